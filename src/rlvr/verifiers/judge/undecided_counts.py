"""Counts of the verdicts that a model was asked for and did not give, by cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers.judge.chat_client import Cause, JudgeError


class UndecidedCounts:
    """Makes undecided verdicts, and counts them until they are taken."""

    def __init__(self) -> None:
        self._causes: Counter[Cause] = Counter()

    def verdict(self, error: JudgeError, **more: Any) -> Verdict:
        """The verdict in the place of the one that is missing; `more` are fields of it."""
        self._causes[error.cause] += 1
        status = VerdictStatus.TIMEOUT if error.cause == "deadline" else VerdictStatus.ERROR
        return Verdict.undecided(f"{error.cause}: {error}", status, **more)

    def take(self) -> dict[str, float]:
        """The metrics `undecided` and `undecided/CAUSE` since the last call."""
        causes, self._causes = self._causes, Counter()
        return {"undecided": sum(causes.values()), **{f"undecided/{cause}": count for cause, count in causes.items()}}
