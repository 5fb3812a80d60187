"""Counts of the exceptions of verifiers and reward functions, and of the verdicts that are missing because of them.

An exception costs one rollout its verdict, since answers that nobody foresaw must not end a run. A verifier that raises
on every answer is a mistake, and a run or an evaluation that goes on with it is wasted. The same holds for each part of
a verifier that is made of verifiers, so that each is counted by itself, also where other parts decide without it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rlvr.errors import UserCodeError
from rlvr.records import Rollout, Verdict

log = logging.getLogger(__name__)

SO_FAR = "that it was asked for"
"""The answers that are judged, in the words of an error."""


def tracebacks_of(name: str, verdict: Verdict) -> Mapping[str, str]:
    """The verifiers that judged in a verdict of the verifier `name`, itself or its parts (`name/part`) -> traceback or
    ""."""
    if not verdict.parts:
        return {name: verdict.traceback}
    return {f"{name}/{part}": traceback for part, traceback in verdict.parts.items()}


class RaisedVerdicts:
    """Verdicts that are missing because of an exception, and exceptions by verifier and part."""

    def __init__(self) -> None:
        self.verdicts = 0
        """Verdicts that were requested."""
        self.missing = 0
        """Verdicts that are missing because of an exception."""
        self.asked: Counter[str] = Counter()
        """Verifier or part -> number of answers that it judged or raised on."""
        self.raised: Counter[str] = Counter()
        """Verifier or part -> number of answers for which it raised."""
        self.tracebacks: dict[str, str] = {}
        """Verifier or part -> its first traceback."""

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
        # Not one verdict: also where several verifiers share the failures.
        if 0 < self.verdicts == self.missing:
            self._refuse(max(self.raised, key=lambda judge: self.raised[judge]), which)

    def refuse_broken(self, at_least: int, which: str) -> None:
        """Raise UserCodeError where a verifier or a part raised on every answer, of at least so many."""
        for name, count in self.asked.items():
            if self.raised[name] == count >= at_least:
                self._refuse(name, which)

    def _refuse(self, name: str, which: str) -> None:
        count = f"every answer {which} ({self.asked[name]})"
        if self.raised[name] < self.asked[name]:
            count = f"{self.raised[name]} of {self.asked[name]} answers {which}, and others on the rest"
        raise UserCodeError(f"the verifier {name!r} failed on {count}", self.tracebacks[name])


class CountsCalls(Protocol):
    """A reward function that counts its exceptions."""

    calls: int
    raised: int
    traceback: str
    """The newest one."""


class Raised:
    """Exceptions of verifiers and reward functions in a stage: the end of a run where one always raises, else a
    warning.

    Each verifier, each part of a combined one and each reward function is judged by itself, over all answers that it
    was asked for since the stage was made, once they are as many as those of the first step: a verifier that rows name,
    or a part that they are routed to, sees few answers of a step.

    `functions` are the plain functions among the rewards, by name, `paid` those of them that may pay; `speaks`: it is
    this rank that warns.
    """

    def __init__(
        self, functions: Sequence[tuple[str, CountsCalls]], paid: Sequence[tuple[str, CountsCalls]], speaks: bool
    ) -> None:
        self._functions = functions
        self._paid = paid
        self._speaks = speaks
        self._verdicts = RaisedVerdicts()
        self._first_judged = 0
        """Number of rollouts with verdicts in the first step that had any: each verifier gives at most one of each."""
        self._first_rollouts = 0
        """Number of rollouts in that step."""
        self._counted = {name: (0, 0) for name, _ in self._functions}
        """Reward function -> its calls, and those that raised, up to the last step."""
        self._warned: set[tuple[str, str]] = set()

    def look(self, rollouts: list[Rollout]) -> dict[str, int]:
        """The metrics `verdict/raised` and `reward/raised` of a step.

        UserCodeError where a verifier, or a reward function that pays, raised on every answer so far, as many as the
        first step had. Otherwise one warning for each kind of exception. A function of weight 0 is only monitored, so
        it warns.
        """
        step = RaisedVerdicts()
        step.add(rollouts)
        self._verdicts.add(rollouts)
        self._first_judged = self._first_judged or sum(bool(rollout.verdicts) for rollout in rollouts)
        self._first_rollouts = self._first_rollouts or len(rollouts)
        # Before the warnings, so that a run that ends gives the reason only as its error.
        self._refuse_broken()
        for rollout in rollouts:
            for name, verdict in rollout.verdicts.items():
                for judge, traceback in tracebacks_of(name, verdict).items():
                    if traceback:
                        self._warn(f"the verifier {judge!r}", step.raised[judge], step.asked[judge], traceback)
        by_rewards = 0
        for name, function in self._functions:
            calls, raised = self._counted[name]
            self._counted[name] = (function.calls, function.raised)
            if function.raised > raised:
                by_rewards += function.raised - raised
                self._warn(f"the reward {name!r}", function.raised - raised, function.calls - calls, function.traceback)
        return {"verdict/raised": step.missing, "reward/raised": by_rewards}

    def _refuse_broken(self) -> None:
        self._verdicts.refuse_all(SO_FAR)
        self._verdicts.refuse_broken(max(1, self._first_judged), SO_FAR)
        for name, function in self._paid:
            if function.raised == function.calls >= max(1, self._first_rollouts):
                problem = f"the reward {name!r} failed on every answer {SO_FAR} ({function.calls})"
                raise UserCodeError(problem, function.traceback)

    def _warn(self, who: str, raised: int, total: int, traceback: str) -> None:
        # The last line of a traceback is `KeyError: ...`; one warning for each type, since messages often hold the
        # answer.
        kind = traceback.rpartition("\n")[2].partition(":")[0]
        if self._speaks and (who, kind) not in self._warned:
            self._warned.add((who, kind))
            if raised == total:
                count = f"all {total}"
            else:
                count = f"{raised} of {total}"
            log.warning(
                "%s failed on %s answers of a step, which are left out unless another part decides them (reported once "
                "for each kind):\n%s",
                who,
                count,
                traceback,
            )
