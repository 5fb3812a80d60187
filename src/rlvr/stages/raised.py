"""What verifiers and reward functions raised: the end of a run in which all did, and a warning where some did.

An exception costs one rollout its reward, since answers that nobody foresaw must not end a run. One that is raised for every
answer is a mistake in the function, and training on would waste the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rlvr.errors import UserCodeError
from rlvr.records import Rollout
from rlvr.rewards import Term, walk
from rlvr.rewards.per_completion import PerCompletion

log = logging.getLogger(__name__)


def some_decided(rollouts: list[Rollout], where: str) -> list[Rollout]:
    """`rollouts`; UserCodeError with the first traceback where the verifier raised on all. `where` says when, in words."""
    verdicts = [(name, verdict) for rollout in rollouts for name, verdict in rollout.verdicts.items()]
    if verdicts and all(verdict.traceback for _, verdict in verdicts):
        name, first = verdicts[0]
        raise _all_raised(f"the verifier {name!r}", where, len(verdicts), first.traceback)
    return rollouts


def _all_raised(who: str, where: str, answers: int, traceback: str) -> UserCodeError:
    return UserCodeError(
        f"{who} failed on every answer of {where} ({answers}), so there is nothing to learn from. Nothing was trained; "
        f"correct it and start again. What it raised:\n{traceback}"
    )


class Raised:
    """What was raised in a stage. `speaks`: it is this rank that warns."""

    def __init__(self, terms: Sequence[Term], speaks: bool) -> None:
        self._terms = [(t.name, t.function) for t in walk(terms) if isinstance(t.function, PerCompletion)]
        self._speaks = speaks
        self._first = True
        self._counted = 0
        self._said: set[tuple[str, str]] = set()

    def look(self, rollouts: list[Rollout]) -> dict[str, int]:
        """The metrics `verdict/raised` and `reward/raised` of a step.

        UserCodeError where the verifier, or a reward function, raised on every answer of the first step that this process
        scores. Otherwise one warning for each kind of exception.
        """
        if self._first:
            self._first = False
            some_decided(rollouts, "the first step")
            for name, function in self._terms:
                if function.raised == function.calls >= max(1, len(rollouts)):
                    raise _all_raised(f"the reward {name!r}", "the first step", function.calls, function.traceback)
        by_verifiers = 0
        for rollout in rollouts:
            for name, verdict in rollout.verdicts.items():
                if verdict.traceback:
                    by_verifiers += 1
                    self._warn(f"the verifier {name!r}", verdict.traceback)
        for name, function in self._terms:
            if function.raised:
                self._warn(f"the reward {name!r}", function.traceback)
        total = sum(function.raised for _, function in self._terms)
        by_rewards, self._counted = total - self._counted, total
        return {"verdict/raised": by_verifiers, "reward/raised": by_rewards}

    def _warn(self, who: str, traceback: str) -> None:
        kind = traceback.rpartition("\n")[2].partition(":")[0]
        if self._speaks and (who, kind) not in self._said:
            self._said.add((who, kind))
            log.warning("%s failed on some answers, which are left out (said once for each kind):\n%s", who, traceback)
