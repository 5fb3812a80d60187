"""Exceptions of verifiers and reward functions in a stage: the end of a run where one always raises, else a warning.

Each verifier, each part of a combined one and each reward function is judged by itself, over all answers that it was asked for since the stage was made,
once they are as many as those of the first step: a verifier that rows name, or a part that they are routed to, sees few answers of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from rlvr.errors import UserCodeError
from rlvr.records import Rollout
from rlvr.rewards import Term, walk
from rlvr.rewards.per_completion import PerCompletion
from rlvr.verifiers.raised_verdicts import RaisedVerdicts, tracebacks_of

log = logging.getLogger(__name__)

SO_FAR = "that it was asked for"
"""The answers that are judged, in the words of an error."""


class Raised:
    """What was raised in a stage. `speaks`: it is this rank that warns."""

    def __init__(self, terms: Sequence[Term], speaks: bool) -> None:
        self._terms = [(t.name, t.function) for t in walk(terms) if isinstance(t.function, PerCompletion)]
        self._paid = [(t.name, t.function) for t in _paid(terms) if isinstance(t.function, PerCompletion)]
        self._speaks = speaks
        self._verdicts = RaisedVerdicts()
        self._first_verdicts = 0
        """Verdicts of the first step that had any,"""
        self._first_rollouts = 0
        """and its rollouts."""
        self._counted = {name: (0, 0) for name, _ in self._terms}
        """Reward function -> its calls, and those that raised, up to the last step."""
        self._said: set[tuple[str, str]] = set()

    def look(self, rollouts: list[Rollout]) -> dict[str, int]:
        """The metrics `verdict/raised` and `reward/raised` of a step.

        UserCodeError where a verifier, or a reward function that pays, raised on every answer so far, as many as the first
        step had. Otherwise one warning for each kind of exception. A function of weight 0 is only monitored, so it warns.
        """
        step = RaisedVerdicts()
        step.add(rollouts)
        self._verdicts.add(rollouts)
        self._first_verdicts = self._first_verdicts or step.verdicts
        self._first_rollouts = self._first_rollouts or len(rollouts)
        self._refuse_broken()
        for rollout in rollouts:
            for name, verdict in rollout.verdicts.items():
                for judge, traceback in tracebacks_of(name, verdict).items():
                    if traceback:
                        self._warn(f"the verifier {judge!r}", step.raised[judge], step.asked[judge], traceback)
        by_rewards = 0
        for name, function in self._terms:
            calls, raised = self._counted[name]
            self._counted[name] = (function.calls, function.raised)
            if function.raised > raised:
                by_rewards += function.raised - raised
                self._warn(f"the reward {name!r}", function.raised - raised, function.calls - calls, function.traceback)
        return {"verdict/raised": step.missing, "reward/raised": by_rewards}

    def _refuse_broken(self) -> None:
        self._verdicts.refuse_all(SO_FAR)
        self._verdicts.refuse_broken(max(1, self._first_verdicts), SO_FAR)
        for name, function in self._paid:
            if function.raised == function.calls >= max(1, self._first_rollouts):
                problem = f"the reward {name!r} failed on every answer {SO_FAR} ({function.calls})"
                raise UserCodeError(problem, function.traceback)

    def _warn(self, who: str, raised: int, asked: int, traceback: str) -> None:
        kind = traceback.rpartition("\n")[2].partition(":")[0]
        if self._speaks and (who, kind) not in self._said:
            self._said.add((who, kind))
            count = f"all {asked}" if raised == asked else f"{raised} of {asked}"
            log.warning(
                "%s failed on %s answers of a step, which are left out unless another part decides them (said once for each "
                "kind):\n%s",
                who,
                count,
                traceback,
            )


def _paid(terms: Sequence[Term]) -> Iterator[Term]:
    """The terms that may pay, with those that they are made of. A scheduled weight is an object, which is not 0."""
    for term in terms:
        if term.weight != 0:
            yield term
            yield from _paid(term.parts())
