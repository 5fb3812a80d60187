"""The tables that `python -m rlvr.audit` prints. Only words and columns: what was found is in findings and trial."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.monitor.console import Console
from rlvr.monitor.console_text import shorten
from rlvr.records import VerdictStatus
from rlvr.verifiers.audit.findings import Findings
from rlvr.verifiers.audit.trial import TrickOutcome, TrickTrial
from rlvr.verifiers.audit.tricks import TRICKS

_TEXT = 120
_IDS = 20
_FAILURES = 20


def show_findings(console: Console, findings: Findings) -> None:
    """Counts by verifier and status, agreement, the slowest and the doubtful cases."""
    statuses = [str(status) for status in VerdictStatus]
    # A column for each verifier and not a row: a terminal of 80 columns has no room for a column of each status.
    columns: list[list[object]] = [["rows", *statuses, "undecided", "mean score", "mean time", "slowest"]]
    for name, counts in findings.counts.items():
        total = sum(counts[status] for status in statuses)
        seconds = findings.seconds[name]
        cells = [counts[status] for status in statuses] + [counts["undecided"]]
        decided = total - counts["undecided"]
        mean = findings.scores[name] / decided if decided else None
        columns.append([total, *cells, mean, _time(seconds.total / total), _time(seconds.most)])
    title = "verdicts (undecided ones are counted under their status too)"
    console.table(title, ["", *findings.counts], zip(*columns, strict=True))
    _agreement(console, findings)
    if findings.slowest:
        slowest = [[c.id, _time(c.verdict.seconds), c.verdict.status, _text(c.completion)] for c in findings.slowest]
        console.table("slowest", ["id", "time", "status", "completion"], slowest)
    if findings.doubts:
        doubtful = [
            [f"{kind} ({findings.doubts[kind]})", c.id, c.verdict.status, shorten(why, _TEXT), _text(c.completion)]
            for kind, kept in findings.doubtful.items()
            for c, why in kept
        ]
        console.table(
            "doubtful, the first of each kind", ["what (rows)", "id", "status", "why", "completion"], doubtful
        )


def _agreement(console: Console, findings: Findings) -> None:
    counts = findings.agreement.counts
    undecided = findings.agreement.undecided
    decided = counts.total()
    if not decided + undecided:
        return
    rows: list[Sequence[object]] = [
        ["accepted", counts[True, True], counts[True, False]],
        ["rejected", counts[False, True], counts[False, False]],
    ]
    console.table("agreement with `expected`", ["", "expected true", "expected false"], rows)
    share = ""
    if decided:
        right = counts[True, True] + counts[False, False]
        share = f", {right} of {decided} decided ones agree ({right / decided:.1%})"
    console.message(f"{decided + undecided} rows have an expectation, {undecided} of them undecided{share}")
    for what, outcome in (("false accepts", (True, False)), ("false rejects", (False, True))):
        count = counts[outcome]
        ids = findings.agreement.ids.get(outcome, [])
        more = f" and {count - _IDS} more" if count > _IDS else ""
        console.message(f"{what}: {count}" + (f" ({', '.join(ids[:_IDS])}{more})" if ids else ""))


def show_trial(console: Console, trial: TrickTrial) -> None:
    """Print the controls that were paid, the outcomes of each trick, and how to repeat those that failed."""
    for task, control in trial.controls:
        if control is None:
            text = f"task {task.id}: no correct completion was paid, so only tricks that need none were tried"
            console.message(text, "warning")
        else:
            if control.target.gold is None:
                gold = ""
            else:
                gold = f" {shorten(control.target.gold, 40)!r}"
            console.message(
                f"task {task.id}: a correct answer{gold} in the form {control.target.form.name!r} is paid "
                f"{control.paid:g}"
            )
    rows = []
    for trick in TRICKS:
        if trick.name in trial.counts:
            counts = trial.counts[trick.name]
            cells = [counts[outcome] or None for outcome in TrickOutcome]
            rows.append([trick.name, sum(counts.values()), *cells, _time(trial.seconds[trick.name])])
    columns = ["trick", "tried", *map(str, TrickOutcome), "slowest"]
    # Without those that have no value: the table fits a terminal of 80 columns.
    used = [place for place in range(len(columns)) if any(row[place] is not None for row in rows)]
    console.table("tricks", [columns[place] for place in used], [[row[place] for place in used] for row in rows])
    if trial.not_tried:
        console.message(f"not tried, for want of a task that they fit: {', '.join(trial.not_tried)}")
    if late := [f"{name} ({count})" for name, count in trial.timeouts.items() if count]:
        console.message(f"timeouts: {', '.join(late)}")
    if not trial.failures:
        console.message("no trick was paid in full, and none was left undecided")
        return
    failures = [
        [a.trick.name, a.outcome, a.task.id, a.verdict.score, shorten(a.verdict.reason, _TEXT), _text(a.completion)]
        for a in trial.failures[:_FAILURES]
    ]
    title = f"{len(trial.failures)} failed attempts"
    if len(trial.failures) > _FAILURES:
        title += f", the first {_FAILURES}"
    console.table(title, ["trick", "outcome", "task", "score", "reason", "completion"], failures)


def _time(seconds: float) -> str:
    """Seconds as `0.1 ms` or `1.20 s`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _text(completion: str) -> str:
    return repr(shorten(completion, _TEXT))
