"""From the results of cases to one score, and when to stop running more of them.

Cases run in their order, in growing groups: one, two, four, eight. So a program that fails at once costs one execution,
and one that passes uses all cores. Invariant: the score does not depend on how many cases ran beyond what decides it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from rlvr.records import Verdict, VerdictStatus
from rlvr.verifiers.code.cases import Case, Result, Trial
from rlvr.verifiers.code.runner import Ended

Credit = Literal["all", "share", "first_failure"]

# Arbitrary: enough to use the cores of a common machine for one answer, few enough that other answers are not kept
# waiting.
AT_ONCE = 8
"""Cases of one program under way at a time."""

_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")


async def tried(cases: Sequence[Case], trial: Trial, credit: Credit) -> list[Result]:
    """The results of the first cases, as many as decide the score; past the trial's `total_time` the rest counts as
    failed."""
    results: list[Result] = []
    size = 1
    while len(results) < len(cases):
        # Looked at between groups, so up to `AT_ONCE` cases may run past the limit; each has its own.
        if trial.seconds_left < 0:
            late = Result(0.0, f"all cases together took more than {trial.total_time:g} s", Ended.TIME)
            return results + [late] * (len(cases) - len(results))
        group = cases[len(results) : len(results) + size]
        results += await asyncio.gather(*(case.judge(trial) for case in group))
        # The first failure decides `all` and `first_failure`; `share` needs every case.
        if credit != "share" and any(result.passed is not None and result.passed < 1 for result in results):
            break
        # 1, 2, 4, 8: a program that fails its first case, as most do early in training, costs one run.
        size = min(2 * size, AT_ONCE)
    return results


def scored(cases: Sequence[Case], results: Sequence[Result], credit: Credit, program: str) -> Verdict:
    """The verdict on a program, of the results of its first cases.

    `all`: 1 where every case passes, else 0. `share`: the weight of what passes over the weight of all.
    `first_failure`: the same of the cases before the first one that fails. A case that the sandbox left undecided
    leaves the whole so, unless the others decide it already.
    """
    total = sum(case.weight for case in cases)
    counted: list[tuple[Case, Result]] = list(zip(cases, results, strict=False))
    bad = next((pair for pair in counted if pair[1].passed is not None and pair[1].passed < 1), None)
    open_cases = [result for _, result in counted if result.passed is None]
    # Cases after the first failure do not count, whether they ran or not: how many ran depends on the growing groups.
    if credit == "first_failure" and bad is not None:
        before = counted[: next(i for i, pair in enumerate(counted) if pair is bad) + 1]
        open_cases = [result for _, result in before if result.passed is None]
        counted = before
    # With `all`, one failed case makes the score 0 whatever the undecided ones would have been.
    if open_cases and not (credit == "all" and bad is not None):
        return Verdict.undecided(open_cases[0].reason, answer=program)
    share = sum(case.weight * (result.passed or 0.0) for case, result in counted) / total
    if bad is None:
        return Verdict.from_score(1.0, answer=program, scores={"passed": 1.0})
    case, result = bad
    score = 0.0 if credit == "all" else share
    reason = f"{case.place} of {len(cases)}: {result.reason}"[:500]
    return Verdict(_status(score, result), score, reason, program, {"passed": share} if credit == "share" else {})


def _status(score: float, result: Result) -> VerdictStatus:
    if score >= 1:
        return VerdictStatus.CORRECT
    if score > 0:
        return VerdictStatus.PARTIAL
    # The source is compiled in the sandbox only, so that a program which cannot be parsed is known by its exception.
    if result.reason.startswith(_UNREADABLE):
        return VerdictStatus.UNPARSABLE
    return {Ended.TIME: VerdictStatus.TIMEOUT, Ended.MEMORY: VerdictStatus.ERROR}.get(result.ended, VerdictStatus.WRONG)
