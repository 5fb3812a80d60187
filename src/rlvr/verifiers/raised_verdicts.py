"""Counts of the verdicts that are missing because a verifier raised.

An exception costs one rollout its verdict, since answers that nobody foresaw must not end a run. A verifier that raises on
every answer is a mistake, and a run or an evaluation that goes on with it is wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlvr.errors import UserCodeError
from rlvr.records import Rollout


class RaisedVerdicts:
    """Verdicts by verifier, and those of them for which it raised."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        """Verifier -> verdicts that it was asked for,"""
        self.raised: Counter[str] = Counter()
        """those for which it raised,"""
        self.tracebacks: dict[str, str] = {}
        """and the first traceback."""

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Count the verdicts of rollouts."""
        for rollout in rollouts:
            for name, verdict in rollout.verdicts.items():
                self.asked[name] += 1
                if verdict.traceback:
                    self.raised[name] += 1
                    self.tracebacks.setdefault(name, verdict.traceback)

    def refuse_all(self, which: str) -> None:
        """Raise UserCodeError with the first traceback where every verdict is missing. `which` answers, in words."""
        if 0 < self.asked.total() == self.raised.total():
            self._refuse(next(iter(self.tracebacks)), which)

    def refuse_broken(self, at_least: int, which: str) -> None:
        """Raise UserCodeError where one of the verifiers raised on every answer, of at least so many."""
        for name, asked in self.asked.items():
            if self.raised[name] == asked >= at_least:
                self._refuse(name, which)

    def _refuse(self, name: str, which: str) -> None:
        problem = f"the verifier {name!r} failed on every answer {which} ({self.asked[name]})"
        raise UserCodeError(problem, self.tracebacks[name])
