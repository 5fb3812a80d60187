"""Counts of the exceptions of verifiers, and of the verdicts that are missing because of them.

An exception costs one rollout its verdict, since answers that nobody foresaw must not end a run. A verifier that raises on
every answer is a mistake, and a run or an evaluation that goes on with it is wasted. The same holds for each part of a
verifier that is made of verifiers, so that each is counted by itself, also where other parts decide without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rlvr.errors import UserCodeError
from rlvr.records import Rollout, Verdict


def tracebacks_of(name: str, verdict: Verdict) -> Mapping[str, str]:
    """The verifiers that judged in a verdict of the verifier `name`, itself or its parts (`name/part`) -> traceback or ""."""
    if not verdict.parts:
        return {name: verdict.traceback}
    return {f"{name}/{part}": traceback for part, traceback in verdict.parts.items()}


class RaisedVerdicts:
    """Verdicts that are missing because of an exception, and exceptions by verifier and part."""

    def __init__(self) -> None:
        self.verdicts = 0
        """Verdicts that were asked for,"""
        self.missing = 0
        """and those of them that are missing because of an exception."""
        self.asked: Counter[str] = Counter()
        """Verifier or part -> answers that it was asked about,"""
        self.raised: Counter[str] = Counter()
        """those for which it raised,"""
        self.tracebacks: dict[str, str] = {}
        """and the first traceback."""

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Count the verdicts of rollouts."""
        for rollout in rollouts:
            for name, verdict in rollout.verdicts.items():
                self.verdicts += 1
                self.missing += bool(verdict.traceback)
                for judge, traceback in tracebacks_of(name, verdict).items():
                    self.asked[judge] += 1
                    if traceback:
                        self.raised[judge] += 1
                        self.tracebacks.setdefault(judge, traceback)

    def refuse_all(self, which: str) -> None:
        """Raise UserCodeError with the first traceback where every verdict is missing. `which` answers, in words."""
        if 0 < self.verdicts == self.missing:
            self._refuse(max(self.raised, key=lambda judge: self.raised[judge]), which)

    def refuse_broken(self, at_least: int, which: str) -> None:
        """Raise UserCodeError where a verifier or a part raised on every answer, of at least so many."""
        for name, asked in self.asked.items():
            if self.raised[name] == asked >= at_least:
                self._refuse(name, which)

    def _refuse(self, name: str, which: str) -> None:
        count = f"every answer {which} ({self.asked[name]})"
        if self.raised[name] < self.asked[name]:
            count = f"{self.raised[name]} of {self.asked[name]} answers {which}, and others on the rest"
        raise UserCodeError(f"the verifier {name!r} failed on {count}", self.tracebacks[name])
