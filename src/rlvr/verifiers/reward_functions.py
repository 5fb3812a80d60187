"""Verifiers as the reward functions of other libraries: TRL's `reward_funcs` and verl's `compute_score`.

    trainer = GRPOTrainer(reward_funcs=[trl_reward(MathVerifier())], ...)           # TRL
    compute_score = verl_score(MathVerifier())                                     # the file of custom_reward_function.path

Invariants: nothing raises, whatever the completion holds; an undecided verdict is None for TRL, which leaves it out of the
reward, and `undecided` for verl, which knows no such thing. A verifier with needs (a process, a sandbox, a remote service)
runs in a VerifierPool, which holds it to its time limit; the others run in the caller's thread.

Sources: TRL `GRPOTrainer._calculate_rewards` calls `f(prompts=, completions=, completion_ids=, **columns)`, takes the name from
`__name__` and None as missing; verl `NaiveRewardManager` calls `compute_score(data_source=, solution_str=, ground_truth=,
extra_info=)` for one response and takes a number.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr.records import Task, Verdict
from rlvr.verifiers.base import FunctionVerifier, Verifier, as_verdict, as_verifier, display_name, is_coroutine


def trl_reward(verifier: Any, answer: str = "answer") -> Callable[..., list[float | None]]:
    """A function for TRL's `reward_funcs`; `answer` is the data set's column with the reference answer.

    The other columns are the task's `info`. `verifier` is a Verifier, or a name or mapping as in the configuration.
    """
    judge = _judge(as_verifier(verifier))

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        rows = {
            name: values for name, values in columns.items() if isinstance(values, list) and len(values) == len(prompts)
        }
        answers = rows.pop(answer, [None] * len(prompts))
        verdicts = []
        for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            task = Task(str(at), prompt, answers[at], info={name: values[at] for name, values in rows.items()})
            verdicts.append(judge(task, _text(completion)))
        return [verdict.score for verdict in verdicts]

    reward.__name__ = reward.__qualname__ = display_name(as_verifier(verifier))
    return reward


def verl_score(verifier: Any, undecided: float = 0.0) -> Callable[..., float]:
    """A function for verl's `compute_score`; `undecided` is the score where the verifier cannot tell, by no fault of the answer.

    `extra_info` becomes the task's `info`, its `question` or `prompt` the prompt, where it has one.
    """
    judge = _judge(as_verifier(verifier))

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **more: Any
    ) -> float:
        info = dict(extra_info or {})
        prompt = info.get("question") or info.get("prompt") or ""
        task = Task(str(info.get("index", "")), prompt, ground_truth, info=info, source=data_source)
        score = judge(task, solution_str).score
        return undecided if score is None else score

    return compute_score


def _text(completion: Any) -> str:
    """The text of a completion; of a conversation, what its last message says."""
    if isinstance(completion, str) or not completion:
        return completion or ""
    content = completion[-1].get("content")
    return content if isinstance(content, str) else ""


def _judge(verifier: Verifier) -> Callable[[Task, str], Verdict]:
    alone = not (
        verifier.needs.process
        or verifier.needs.sandbox
        or verifier.needs.remote
        or verifier.verify_group is not None
        or isinstance(verifier, FunctionVerifier)
        or is_coroutine(verifier.verify)
        or is_coroutine(getattr(verifier, "compose", None))
    )
    if alone:
        return functools.partial(_here, verifier)

    pool: Any = None
    lock = threading.Lock()

    def judge(task: Task, completion: str) -> Verdict:
        nonlocal pool
        with lock:  # libraries call from many threads, which share one pool
            if pool is None:
                from rlvr.verifiers.pool import VerifierPool

                pool = VerifierPool()
        return pool.verify_many(verifier, [(task, completion)])[0]

    return judge


def _here(verifier: Verifier, task: Task, completion: str) -> Verdict:
    try:
        return as_verdict(verifier.verify(task, completion), display_name(verifier))
    except Exception as error:  # a reward function that raises ends the run of the library that called it
        return Verdict.undecided(f"{display_name(verifier)} raised {type(error).__name__}: {error}")
