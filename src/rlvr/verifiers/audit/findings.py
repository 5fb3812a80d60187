"""Findings of an audit in many verdicts: counts by verifier and status, agreement with what was expected, cases worth a
look.

Invariant: memory is bounded, however many verdicts are added: counts are kept of all, cases only of the worst or the
first.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rlvr.monitor.console_text import shorten
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers.answers import extract_answer
from rlvr.verifiers.audit.targets import gold_texts

SHOWN = 10
"""Cases kept of each kind."""

KEPT = 400
"""Characters kept of the completion of a case."""

# Matches `\boxed{42}`; not a box with braces inside. Bounded, so that a megabyte of openers stays cheap.
_BOX = re.compile(r"\\boxed\s*\{([^{}]{0,200})\}")
# What only sets type: `\text`, `\left`, thin spaces, dollars, braces, commas and full stops. `$1{,}000$` and `1000`
# read the same; so do 1.5 and 15, which costs one case too many to look at.
_NOISE = re.compile(r"\\(?:text|mathrm|left|right|,|;|!|\s)|[\s${}.,]")


@dataclass(frozen=True)
class FindingCase:
    """One completion and the verdict on it."""

    id: str
    verifier: str
    completion: str
    verdict: Verdict
    expected: bool | None = None
    task: Task | None = None
    """None where the row could not be read, and in cases that are kept."""


@dataclass
class Agreement:
    """Verdicts against the `expected` column. Accepted is `correct`; a partial or zero score is a rejection."""

    counts: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """(accepted, expected) -> rows."""
    ids: dict[tuple[bool, bool], list[str]] = field(default_factory=dict)
    """The same -> the ids of the first `MOST_IDS` rows."""
    undecided: int = 0

    MOST_IDS = 1000

    def add(self, case: FindingCase) -> None:
        if case.expected is None:
            return
        if case.verdict.score is None:
            self.undecided += 1
            return
        outcome = (case.verdict.status is VerdictStatus.CORRECT, case.expected)
        self.counts[outcome] += 1
        if self.counts[outcome] <= self.MOST_IDS:
            self.ids.setdefault(outcome, []).append(case.id)


@dataclass
class Seconds:
    """Seconds of verdicts."""

    total: float = 0.0
    most: float = 0.0


class Findings:
    """Collects cases. `counts[verifier][status]` counts verdicts, with `undecided` beside the statuses."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: dict[str, Seconds] = {}
        self.scores: dict[str, float] = {}
        self.agreement = Agreement()
        self.doubts: Counter[str] = Counter()
        self.doubtful: dict[str, list[tuple[FindingCase, str]]] = {}
        self._slowest: list[tuple[float, int, FindingCase]] = []
        self._number = itertools.count()

    def add(self, case: FindingCase) -> None:
        """Count one case, and keep it if it is worth a look."""
        verdict = case.verdict
        name = case.verifier
        counts = self.counts.setdefault(name, Counter())
        seconds = self.seconds.setdefault(name, Seconds())
        counts.update([str(verdict.status), *([] if verdict.decided else ["undecided"])])
        seconds.total += verdict.seconds
        seconds.most = max(seconds.most, verdict.seconds)
        self.scores[name] = self.scores.get(name, 0.0) + (verdict.score or 0.0)
        self.agreement.add(case)
        reasons = list(doubts(case))
        case = replace(case, completion=shorten(case.completion, KEPT), task=None)
        for kind, why in reasons:
            self.doubts[kind] += 1
            kept = self.doubtful.setdefault(kind, [])
            if len(kept) < SHOWN:
                kept.append((case, why))
        entry = (verdict.seconds, next(self._number), case)
        if len(self._slowest) < SHOWN:
            # A heap of the slowest SHOWN: its smallest entry is the first to go. The number breaks ties, since cases
            # cannot be compared.
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heappushpop(self._slowest, entry)

    @property
    def slowest(self) -> list[FindingCase]:
        """The slowest cases, the slowest first."""
        return [case for *_, case in sorted(self._slowest, reverse=True)]

    @property
    def rows(self) -> int:
        return sum(sum(counts.values()) - counts["undecided"] for counts in self.counts.values())


def doubts(case: FindingCase) -> Iterator[tuple[str, str]]:
    """(kind of doubt, why) for everything that makes a verdict worth a look."""
    verdict = case.verdict
    answer = case.verdict.answer
    if case.task is None:
        golds = []
    else:
        golds = [gold for gold in gold_texts(case.task) if gold.strip()]
    if verdict.status is VerdictStatus.TIMEOUT:
        yield "timeout", verdict.reason
    elif verdict.score is None:
        yield "undecided", verdict.reason
    if verdict.status is VerdictStatus.PARTIAL:
        yield "partial", f"score {verdict.score:.3g}: {verdict.reason}"
    if verdict.status is VerdictStatus.UNPARSABLE and any(gold in case.completion for gold in golds):
        yield "unparsable, but the gold is in the text", verdict.reason
    if verdict.status is VerdictStatus.WRONG and answer is not None and plain(answer) in map(plain, golds):
        yield "wrong, but it reads like the gold", f"{answer!r} is not {golds[0]!r}"
    if verdict.status is VerdictStatus.CORRECT:
        # Without the reasoning, in which boxes may be tried out.
        boxes = {plain(box) for box in _BOX.findall(case.completion.rpartition("</think>")[2])}
        if len(boxes) > 1:
            yield "correct, with several different boxes", ", ".join(sorted(boxes))
        # 20 characters and three times the longest gold: an answer that long may hold the right one among others.
        # Arbitrary; it only asks for a look.
        if answer is not None and golds and len(answer) > 20 + 3 * max(map(len, golds)):
            yield "correct, but far longer than the gold", f"{shorten(answer, 80)!r} for {shorten(golds[0], 80)!r}"
        # In no box, tag or phrase, and not the whole text either.
        if (
            answer is not None
            and extract_answer(case.completion) is None
            and extract_answer(case.completion, fallback="whole") != answer.strip()
        ):
            yield "correct, but the answer is not marked: a fallback found it", f"{shorten(answer, 80)!r}"


def plain(text: str) -> str:
    """Text without case, spaces, and LaTeX that only sets type."""
    return _NOISE.sub("", text).casefold()
