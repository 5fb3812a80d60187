"""The replies that RAFT and SuperHF discard before they rank the others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.verifiers.base import Needs, Verifier


def own_turn(completion: str, turn: str) -> str:
    """The reply before the other side's turn, which the regular expression `turn` finds, without white space around."""
    return re.split(turn, completion, maxsplit=1)[0].strip()


@dataclass(frozen=True)
class CleanReply(Verifier):
    """1 for a reply that may be trained on, 0 for one to discard: too short, or with text that the reward model misses.

    `_discard_sample` and `_clean_text` of OptimalScale/LMFlow, commit f3597db, src/lmflow/pipeline/raft_aligner.py,
    where a reply with `#` or of less than two characters is discarded. What stands after a turn of the other side has
    begun is not looked at: end the response there by `rollout.stop`.
    """

    forbidden: str = "#"
    """A regular expression: a reply in which it is found is discarded; empty: none is."""
    turn: str = "Human:"
    """A regular expression: what begins the other side's turn. It and what follows do not count."""
    shortest: int = 2
    """Fewest characters of a reply, without white space around it."""

    needs: ClassVar[Needs] = Needs()

    def __post_init__(self) -> None:
        for name, expression in (("forbidden", self.forbidden), ("turn", self.turn)):
            try:
                re.compile(expression)
            except re.error as error:
                raise ConfigError(f"the verifier CleanReply: {name} is no regular expression: {error}") from error

    def verify(self, task: Task, completion: str) -> Verdict:
        reply = own_turn(completion, self.turn)
        if len(reply) < self.shortest:
            return Verdict.from_score(0.0, reason=f"fewer than {self.shortest} characters")
        if self.forbidden and re.search(self.forbidden, reply):
            return Verdict.from_score(0.0, reason=f"it contains {self.forbidden!r}")
        return Verdict.from_score(1.0)
