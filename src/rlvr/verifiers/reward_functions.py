"""Verifiers as the reward functions of other libraries: TRL's `reward_funcs` and verl's `compute_score`.

    trainer = GRPOTrainer(reward_funcs=[trl_reward(MathVerifier())], ...)  # TRL
    compute_score = verl_score(MathVerifier())  # verl, in the file of custom_reward_function.path

Invariants: whatever a completion says, nothing raises; an undecided verdict is None for TRL, which leaves it out of the
reward, and `undecided` for verl, which knows no such thing. Data that cannot be read (a missing column, a completion
that is no text) is a ConfigError at the first call, and undecided in later ones. The functions are pickled as their
verifier is; a process that runs a verifier with needs starts a VerifierPool of its own at the first call. The other
verifiers run in the caller's thread.

Sources: TRL 1.16 `GRPOTrainer._calculate_rewards` calls `f(prompts=, completions=, completion_ids=, trainer_state=,
log_extra=, log_metric=, **columns)`, takes the name from `__name__` and None as missing; verl 0.9 `NaiveRewardManager`
and the reward loop call `compute_score(data_source=, solution_str=, ground_truth=, extra_info=)` for one response and
take a number, the latter in a thread, or in a Ray actor; `PrimeRewardManager` gives the same by position to a pool of
processes; `BatchRewardManager` calls once for a batch, with the names in the plural.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.verifiers.base import FunctionVerifier, Verifier, as_verdict, as_verifier, display_name, is_coroutine

if TYPE_CHECKING:
    from rlvr.verifiers.pool import VerifierPool


def trl_reward(verifier: Any, answer: str = "answer") -> Callable[..., list[float | None]]:
    """A function for TRL's `reward_funcs`; `answer` is the data set's column with the reference answer.

    The other columns are the task's `info`. `verifier` is a Verifier, or a name or mapping as in the configuration.
    """
    return TrlReward(as_verifier(verifier), answer)


def verl_score(verifier: Any, undecided: float = 0.0) -> Callable[..., float]:
    """A function for verl's `compute_score`; `undecided` is the score where the verifier cannot tell, by no fault of
    the answer.

    `extra_info` becomes the task's `info`, its `question` or `prompt` the prompt, where it has one.
    """
    return VerlScore(as_verifier(verifier), undecided)


def verl_batch_score(verifier: Any, undecided: float = 0.0) -> Callable[..., list[float]]:
    """The same for verl's `batch` reward manager: one call for all responses of a batch."""
    return VerlBatchScore(as_verifier(verifier), undecided)


class _RewardFunction:
    """A verifier, the place where it runs, and a flag that the data were checked."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.checked = False

    def verdicts(self, rows: Sequence[tuple[Task, Any]]) -> list[Verdict]:
        """The verdicts on (task, completion as the library gives it); undecided where a completion cannot be read."""
        texts = [completion_text(completion) for _, completion in rows]
        readable = [(task, text) for (task, _), text in zip(rows, texts, strict=True) if text is not None]
        if _needs_pool(self.verifier):
            verdicts = iter(_pool().verify_many(self.verifier, readable))
        else:
            verdicts = iter([_verdict_here(self.verifier, task, text) for task, text in readable])
        return [Verdict.undecided("the completion is no text") if text is None else next(verdicts) for text in texts]

    def check(self, rows: Sequence[tuple[Task, Any]], completions: str, answers: str, hint: str = "") -> None:
        """ConfigError at the first call for what cannot be read; `completions` and `answers` name the two columns.

        A later call raises nothing: it would end a run that has begun. A missing reference answer is an error where the
        verifier needs one; one that is of no use to it costs its rows their verdicts.
        """
        if self.checked:
            return
        for task, completion in rows:
            if completion_text(completion) is None:
                raise ConfigError(f"{completions} holds {_kind(completion)}, which is neither a text nor messages")
            if not _is_plain(task.answer):
                raise ConfigError(f"{answers} holds {_kind(task.answer)}: give a text, a number, a list or a mapping")
        if rows and all(task.answer is None for task, _ in rows):
            task = rows[0][0]
            problem = self.verifier.check_task(task)
            # What is wrong with any other answer too is not the answer's absence: a schema in `info`, say.
            if problem is not None and self.verifier.check_task(replace(task, answer="0")) == problem:
                raise ConfigError(f"{display_name(self.verifier)} cannot use the data: {problem}")
            if problem is not None:
                raise ConfigError(f"{answers} is missing or empty: {problem}{hint}")
        self.checked = True


class TrlReward(_RewardFunction):
    """The function that `trl_reward` makes: `f(prompts, completions, **columns) -> list of float or None`."""

    def __init__(self, verifier: Verifier, answer: str) -> None:
        super().__init__(verifier)
        self.answer = answer
        self.__name__ = display_name(verifier)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        """The scores of `completions`, None for undecided ones; ConfigError at the first call where data cannot be
        read."""
        count = len(completions)
        columns.pop("environments", None)  # TRL's own objects, which are no data and may not be sent to a process
        lists = {name: values for name, column in columns.items() if (values := _column(column, count)) is not None}
        if self.answer in columns and self.answer not in lists:
            kind = type(columns[self.answer]).__name__
            raise ConfigError(f"trl_reward: the column {self.answer!r} is {kind}, not a list of {count} entries")
        answers = lists.pop(self.answer, [None] * count)
        rows = []
        for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            info = {name: values[at] for name, values in lists.items()}
            rows.append((Task(str(at), prompt, answers[at], info=info), completion))
        there = ", ".join(map(repr, lists)) or "none"
        hint = f"; name the column with trl_reward(answer=...), the others are: {there}"
        self.check(rows, "trl_reward: the column 'completions'", f"trl_reward: the column {self.answer!r}", hint)
        return [verdict.score for verdict in self.verdicts(rows)]


class _VerlRewardFunction(_RewardFunction):
    def __init__(self, verifier: Verifier, undecided: float) -> None:
        super().__init__(verifier)
        self.undecided = undecided

    def scores(self, sources: Any, solutions: Any, truths: Any, extras: Any) -> list[float]:
        """The scores of responses, given as one list for each of verl's arguments."""
        rows = []
        for source, solution, truth, extra in zip(sources, solutions, truths, extras, strict=True):
            info = _info(extra)
            prompt = info.get("question") or info.get("prompt") or ""
            task = Task(str(info.get("index", "")), prompt, _plain(truth), info=info, source=str(source))
            rows.append((task, solution))
        self.check(rows, "verl_score: solution_str", "verl_score: ground_truth (reward_model.ground_truth in the data)")
        scores = [verdict.score for verdict in self.verdicts(rows)]
        return [self.undecided if score is None else score for score in scores]


class VerlScore(_VerlRewardFunction):
    """The function that `verl_score` makes: `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

    def __call__(
        self, data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **more: Any
    ) -> float:
        """The score of one response; ConfigError at the first call where the data cannot be read."""
        return self.scores([data_source], [solution_str], [ground_truth], [extra_info])[0]


class VerlBatchScore(_VerlRewardFunction):
    """The function that `verl_batch_score` makes: the same, with one list for each argument."""

    def __call__(
        self, data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any = None, **more: Any
    ) -> list[float]:
        """The scores of a batch; ConfigError at the first call where the data cannot be read."""
        if extra_infos is None:
            extra_infos = [None] * len(solution_strs)
        return self.scores(data_sources, solution_strs, ground_truths, extra_infos)


def completion_text(completion: Any) -> str | None:
    """The text of a completion; of a conversation, what its last message says; None for what is neither.

    A message that only calls tools says "", and so does no completion at all.
    """
    if isinstance(completion, (list, tuple)):
        if not completion:
            return ""
        if not isinstance(completion[-1], Mapping):
            alone = len(completion) == 1 and isinstance(completion[0], str)
            return completion[0] if alone else None
        completion = completion[-1]
    if isinstance(completion, Mapping):
        if not {"role", "content"} & completion.keys():
            return None
        completion = completion.get("content")
        if isinstance(completion, list):  # blocks, of which those with a text are what a reader sees
            return "".join(str(block.get("text") or "") for block in completion if isinstance(block, Mapping))
    if completion is None:
        return ""
    if isinstance(completion, str):
        return completion
    return None


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value:
        inner = f" of {type(value[-1]).__name__}"
    else:
        inner = ""
    return type(value).__name__ + inner


def _plain(value: Any) -> Any:
    """`value` with lists in place of tuples and arrays, and Python's numbers in place of NumPy's."""
    if callable(tolist := getattr(value, "tolist", None)):  # of NumPy and torch, neither of which is imported here
        return _plain(tolist())
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int, float))


def _column(values: Any, count: int) -> list[Any] | None:
    """A column with one entry for each completion; None for anything else that TRL hands over."""
    listed = _plain(values)
    if isinstance(listed, list) and len(listed) == count:
        return listed
    return None


def _info(extra: Any) -> dict[str, Any]:
    plain = _plain(extra)
    if isinstance(plain, Mapping):
        return dict(plain)
    return {} if plain is None else {"extra_info": plain}


def _needs_pool(verifier: Verifier) -> bool:
    needs = verifier.needs
    return (
        needs.process
        or needs.sandbox
        or needs.remote
        or verifier.verify_group is not None
        or isinstance(verifier, FunctionVerifier)
        or is_coroutine(verifier.verify)
        or is_coroutine(verifier.compose)
    )


def _verdict_here(verifier: Verifier, task: Task, completion: str) -> Verdict:
    try:
        return as_verdict(verifier.verify(task, completion), display_name(verifier))
    except Exception as error:  # a reward function that raises ends the run of the library that called it
        return Verdict.undecided(f"{display_name(verifier)} raised {type(error).__name__}: {error}")


_pools: dict[int, VerifierPool] = {}
"""Process id -> its pool. A fork keeps its parent's, which it can neither use nor close."""
_making = threading.RLock()
"""Libraries call from many threads, which share one pool. A fork must not inherit it as held by a thread that it
lacks."""
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def _pool() -> VerifierPool:
    """The pool of this process, made at the first call."""
    # Two threads that make the first call together would start two pools.
    with _making:
        pool = _pools.get(os.getpid())
        if pool is None:
            from rlvr.verifiers.pool import VerifierPool

            pool = _pools[os.getpid()] = VerifierPool()
        return pool
