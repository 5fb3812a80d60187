"""The form of a response as a term: by its tags, or as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rlvr import registry
from rlvr.components import RewardTerm
from rlvr.records import Batch, Task
from rlvr.registry import register

# Matches "<think>" and "</answer>"; must not match "{think}" or "a < b".
_TAG = re.compile(r"<[^<>{}]+>")


@register("reward", "format")
@dataclass
class Format(RewardTerm):
    """1 where the response has the form asked for, whatever it says.

    off is always 1. soft is the share of the template's tags that stand in the response exactly once, and after the tag
    before them. hard is 1 where the whole response follows the template, as the verifier `format` judges it, else 0. As
    a term it is a bonus; as the `by` of a gate or a veto, a condition. SimpleRL-Zoo (Zeng et al. 2025, arXiv
    2503.18892) finds that a strict form keeps weak models from exploring.
    """

    template: str = "<think>{think}</think><answer>{answer}</answer>"
    """As in the verifier `format`."""
    strictness: Literal["off", "soft", "hard"] = "hard"
    """The strictness of the check."""
    prompt_wrote: str = ""
    """The beginning of the template that the prompt has written already."""
    _verifier: object = field(default=None, init=False, repr=False)
    _tags: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        options = {"template": self.template, "prompt_wrote": self.prompt_wrote}
        self._verifier = registry.build("verifier", {"name": "format", **options})
        self._tags = _TAG.findall(self.template[len(self.prompt_wrote) :])
        if self.strictness == "soft" and not self._tags:
            raise ValueError(f"strictness soft counts tags, and the template {self.template!r} has none")

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
        return tags / len(self._tags)
