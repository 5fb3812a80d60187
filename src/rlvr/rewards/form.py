"""The form of a response as a term: by its tags or as a whole, and a penalty on repeated n-grams."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlvr import registry
from rlvr.components import RewardTerm
from rlvr.records import Batch, Rollout, Task
from rlvr.registry import register

# Matches "<think>" and "</answer>"; must not match "{think}" or "a < b".
_TAG = re.compile(r"<[^<>{}]+>")


@register("reward", "format")
@dataclass
class Format(RewardTerm):
    """1 where the response has the form asked for, whatever it says.

    off is always 1. soft is the share of the template's tags that stand in the response exactly once, and after the tag
    before them; tags is 1 where all do, whatever stands around them, else 0. hard is 1 where the whole response follows
    the template, as the verifier `format` judges it, else 0. As a term it is a bonus; as the `by` of a gate or a veto,
    a condition. SimpleRL-Zoo (Zeng et al. 2025, arXiv 2503.18892) finds that a strict form keeps weak models from
    exploring.
    """

    template: str = "<think>{think}</think><answer>{answer}</answer>"
    """As in the verifier `format`."""
    strictness: Literal["off", "soft", "tags", "hard"] = "hard"
    """The strictness of the check."""
    prompt_wrote: str = ""
    """The beginning of the template that the prompt has written already."""
    _verifier: object = field(default=None, init=False, repr=False)
    _tags: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        options = {"template": self.template, "prompt_wrote": self.prompt_wrote}
        self._verifier = registry.build("verifier", {"name": "format", **options})
        self._tags = _TAG.findall(self.template[len(self.prompt_wrote) :])
        if self.strictness in ("soft", "tags") and not self._tags:
            raise ValueError(
                f"strictness {self.strictness} counts tags, and the template {self.template!r} has none: put tags in "
                "it, or set strictness to hard"
            )

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._score(r.task, r.text) for r in batch.rollouts], dtype=np.float64)

    def _score(self, task: Task, text: str) -> float:
        if self.strictness == "off":
            return 1.0
        if self.strictness == "hard":
            return float(self._verifier.verify(task, text).score)  # type: ignore[attr-defined]
        tags = 0
        after = 0
        for tag in self._tags:
            place = text.find(tag)
            # Once in the response and once in the template: a repeated tag has no one place that could be in order.
            # `after` does not move past a tag that failed.
            if place >= after and text.count(tag) == self._tags.count(tag) == 1:
                tags += 1
                after = place + len(tag)
        if self.strictness == "tags":
            return float(tags == len(self._tags))
        return tags / len(self._tags)


@register("reward", "repetition")
@dataclass(frozen=True)
class Repetition(RewardTerm):
    """Minus the repeated n-grams of the response: each one that stood before, as a share of all or as a count.

    The share is -(1 - distinct / all), 0 without a repetition and for a response shorter than n. That of words, times
    the largest penalty and behind a gate that only wrong answers pass, is what the cosine reward's authors add to it
    (Yeo et al. 2025, arXiv 2502.03373; eddycmu/demystify-long-cot, commit e90cf9b, openrlhf/openrlhf/reward/cosine.py
    and repetition.py, get_repetition_penalty); their penalty at each repeated token, with a discount of its own, is the
    term `repeated_tokens`. The count is no formula of a paper. With `limit` it is -1 where one n-gram stands that
    often, else 0 (RLPR: 10 times 10 words, OpenBMB/RLPR, commit 8490fca, verl/utils/reward_score/repetition.py, which
    splits words at `_` too and keeps their case). Linear in the length.
    """

    # Four tokens, as the metric completion/repetition counts.
    n: int = 4
    """Length of an n-gram, at least 1."""
    of: Literal["tokens", "words"] = "tokens"
    """Token ids that the policy wrote, or words of the text between white space, in lower case."""
    count: bool = False
    """Count repetitions instead of taking their share."""
    limit: int | None = None
    """-1 where an n-gram stands this often, at least 2, and 0 elsewhere; null: the share or the count."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}: it must be at least 1")
        if self.limit is not None and (self.limit < 2 or self.count):
            raise ValueError("limit is at least 2, and takes the place of count: set one of the two")

    def __call__(self, batch: Batch) -> np.ndarray:
        return np.asarray([self._penalty(self._units(r)) for r in batch.rollouts], dtype=np.float64)

    def _units(self, rollout: Rollout) -> Sequence[Hashable]:
        if self.of == "words":
            return rollout.text.lower().split()
        return rollout.token_ids[rollout.sampled].tolist()

    def _penalty(self, units: Sequence[Hashable]) -> float:
        # Overlapping n-grams: len - n + 1 of them.
        grams = list(zip(*(units[i:] for i in range(self.n)), strict=False))
        if self.limit is not None:
            often = max(Counter(grams).values(), default=0) >= self.limit
            return -1.0 if often else 0.0
        repeated = len(grams) - len(set(grams))
        if self.count:
            return -float(repeated)
        return -repeated / max(1, len(grams))
