"""The likelihood of a given text under the policy: the reference answer after its own reasoning, or its response
without the prompt.

No verifier is read. A term requests log-probs (`asks`) of token ids after other token ids. The stage computes them
under the policy as it is before the update, in the micro-batches of the update, and passes them to the term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from rlvr.components import Continuation, Encode, RewardContext, RewardTerm
from rlvr.core.answer_text import PLACE, check_place, with_answer
from rlvr.errors import ConfigError
from rlvr.records import Batch, Rollout
from rlvr.registry import register


def tokens_before_answer(rollout: Rollout, opening: str) -> int | None:
    """Tokens of a rollout, its prompt among them, up to the last one that ends within the first `opening` of its text.

    None where there is no opening. Reads `Rollout.char_ends`.
    """
    start = rollout.text.find(opening)
    if start < 0 or rollout.char_ends is None:
        return None
    # A token may reach over the opening's end (">42" as one token); it is left out, and the answer's tokens are put
    # before it.
    within = np.flatnonzero(rollout.sampled & (rollout.char_ends <= start + len(opening)))
    if len(within):
        return int(within[-1]) + 1
    # No token ends within the opening: the first one reaches over it, so the answer follows the prompt.
    return int(np.flatnonzero(rollout.sampled)[0])


@register("reward", "answer_likelihood")
@dataclass(frozen=True)
class AnswerLikelihood(RewardTerm):
    """The likelihood under the policy of the task's reference answer where its own answer begins.

    The response is cut after the last token that ends within `opening`, and the answer's tokens are put there.

    - mean_prob: the mean of the tokens' probabilities (RLPR, Yu et al. 2025, arXiv 2506.18254; OpenBMB/RLPR, commit
      8490fca, verl/workers/reward_manager/prob.py and verl/trainer/ppo/ray_trainer.py, where `debias` is on, `without`
      is 0, `scored` is answer, `baseline` is reference and `bare` is empty).
    - product: the probability of the whole answer (VeriFree, Zhou et al. 2025, arXiv 2505.21493; sail-sg/VeriFree,
      verifree.py, where `text` closes the tag and `finished` is on).
    - reactive: the mean log-prob, each token weighted by its standard deviation over the group's responses, so that
      tokens count which react to the reasoning (the R3 of DRO, Xu et al. 2025, arXiv 2506.13351, from notes; evenly
      where none does).

    A response without `opening` is worth `without`. Undecided where the task has no answer. `algorithm.splice` learns
    the same tokens.
    """

    reduce: Literal["mean_prob", "product", "reactive"] = "mean_prob"
    """The formula that makes one number of the tokens' log-probs."""
    opening: str = "<answer>"
    """The text after which the answer stands."""
    debias: bool = False
    """Subtract the same number without reasoning, where `opening` follows the prompt at once, and cut to [0, 1]
    (RLPR)."""
    baseline: Literal["current", "reference"] = "current"
    """The policy whose number without reasoning `debias` subtracts: as it is before the update, or as it was at the
    start of the stage."""
    bare: str | None = None
    """The text between the prompt and `text` without reasoning; null: `opening`."""
    without: float = 0.0
    """The value of a response without `opening`."""
    text: str = PLACE
    """The text that is put there; `{answer}` stands for the task's answer."""
    scored: Literal["text", "answer"] = "text"
    """The tokens that count: all of `text`, or those that hold a part of the answer, without `text` after it."""
    finished: bool = False
    """A truncated response is worth `without` too, and so is one whose reasoning has, together with `text`, more tokens
    than `rollout.max_new_tokens`."""
    reads_characters: ClassVar = True
    _longest: float = field(default=np.inf, init=False, repr=False)
    """`rollout.max_new_tokens`."""

    def __post_init__(self) -> None:
        if not self.opening:
            raise ValueError("opening is empty: it says where an answer begins")
        check_place(self.text)
        if self.debias and self.reduce == "reactive":
            raise ValueError("debias is of probabilities, and reduce reactive is a log-prob")
        if not self.debias and (self.baseline != "current" or self.bare is not None):
            raise ValueError("baseline and bare say what debias subtracts, and debias is off")

    @property
    def needs_reference(self) -> bool:
        """True where the reference gives the number without reasoning."""
        return self.debias and self.baseline == "reference"

    def bind(self, setting: RewardContext) -> AnswerLikelihood:
        """Checks that the tasks have answers."""
        bare = [task.named for task in setting.tasks if task.answer is None or not str(task.answer)]
        if bare:
            raise ConfigError(
                f"rewards: answer_likelihood scores a task's answer, and {len(bare)} of {len(setting.tasks)} tasks "
                f"have none, the first is {bare[0]}"
            )
        bound = dataclasses.replace(self)
        # Frozen, so not by assignment.
        object.__setattr__(bound, "_longest", float(setting.config.rollout.max_new_tokens))
        return bound

    def asks(self, batch: Batch, encode: Encode) -> list[Continuation]:
        """The answer after each response's reasoning; with debias after the prompt too, once for each group."""
        wanted = []
        seen = set()
        for i, rollout in enumerate(batch.rollouts):
            lead, answer = self._tokens(rollout.task.answer, encode)
            prompt = rollout.token_ids[rollout.origin == 0].tolist()
            if not answer:
                continue
            cut = tokens_before_answer(rollout, self.opening)
            if cut is not None and not self._unfinished(rollout, cut - len(prompt) + len(lead) + len(answer)):
                wanted.append(Continuation(i, [*rollout.token_ids[:cut].tolist(), *lead], answer))
            if self.debias and rollout.group not in seen:
                seen.add(rollout.group)
                opening = self.opening if self.bare is None else self.bare
                # `encode` gives a token of its own for no text.
                bare = encode(opening) if opening else []
                # -1 - i marks the request without reasoning: negative also for i = 0. One for each group, since it
                # depends on the prompt alone.
                wanted.append(Continuation(-1 - i, [*prompt, *bare, *lead], answer, model=self.baseline))
        return wanted

    def _tokens(self, answer: object, encode: Encode) -> tuple[list[int], list[int]]:
        """(token ids of `text` before those that are scored, the scored ones); two empty lists without an answer."""
        if answer is None:
            return [], []
        if self.scored == "text":
            return [], encode(with_answer(self.text, answer))
        before = self.text.partition(PLACE)[0]
        ids = encode(before + str(answer))
        # The tokens that the text before has by itself: one that reaches into the answer (" yes") differs, and counts.
        lead = 0
        for own, joined in zip(encode(before) if before else [], ids[:-1], strict=False):
            if own != joined:
                break
            lead += 1
        return ids[:lead], ids[lead:]

    def _unfinished(self, rollout: Rollout, length: int) -> bool:
        """True where `finished` leaves a response of `length` tokens, with the answer's in it, without a value."""
        return self.finished and (rollout.stop.truncated or length > self._longest)

    def __call__(self, batch: Batch, scored: Sequence[tuple[Continuation, np.ndarray]] = ()) -> np.ndarray:
        result = np.asarray(
            [np.nan if r.task.answer is None else self.without for r in batch.rollouts], dtype=np.float64
        )
        groups = batch.group_index()
        own = {c.rollout: logprobs for c, logprobs in scored if c.rollout >= 0}
        bare = {groups[-1 - c.rollout]: self._value(logprobs) for c, logprobs in scored if c.rollout < 0}
        if self.reduce == "reactive":
            for group in batch.groups():
                members = [i for i in group.index.tolist() if i in own]
                if members:
                    result[members] = _reactive(np.stack([own[i] for i in members]))
            return result
        for i, logprobs in own.items():
            value = self._value(logprobs)
            if self.debias:
                # RLPR: clip(r - r', 0, 1), r' being the same without reasoning.
                result[i] = np.clip(value - bare[groups[i]], 0.0, 1.0)
            else:
                result[i] = value
        return result

    def _value(self, logprobs: np.ndarray) -> float:
        # VeriFree: prod_t p_t = exp(sum log p_t). RLPR: (1/n) sum_t p_t, which one unlikely token does not bring to 0.
        return float(np.exp(logprobs.sum()) if self.reduce == "product" else np.exp(logprobs).mean())


def _reactive(logprobs: np.ndarray) -> np.ndarray:
    """[members, tokens] -> [members]."""
    # [tokens]: the answer is the same for all members of the group, so its tokens can be compared column by column.
    weights = logprobs.std(axis=0)
    return np.average(logprobs, axis=1, weights=weights if weights.sum() > 0 else None)
