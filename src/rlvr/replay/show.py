"""Output of a replay on the console: a line per step, the whole, and examples of what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.monitor.batch import prompt_text
from rlvr.monitor.console import Console
from rlvr.monitor.samples import in_turns
from rlvr.records import Rollout, Verdict
from rlvr.replay.changes import FLIPS, ScoreChange, flip
from rlvr.replay.rescore import Rescored

TEXT = 400
"""Most characters of a prompt or completion that are shown."""
LINES = 40
"""Most lines of the table, the last apart."""
COLUMNS = (
    *("step", "rollouts", "reward", "rescored", *FLIPS),
    *("zero variance", "rescored", "adv. correlation", "adv. opposed"),
)


@dataclass
class Examples:
    """The first rollouts of each kind of change, at most `most` in all and one of each task and kind."""

    most: int
    found: list[tuple[str, int, Rollout, Rollout]] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, rescored: Rescored) -> None:
        """Take what changed in a step."""
        for before, after in zip(rescored.before.rollouts, rescored.after.rollouts, strict=True):
            kind = flip(before.verdict, after.verdict)
            if kind is None or (kind, before.task.id) in self.seen:
                continue
            if sum(k == kind for k, *_ in self.found) < self.most:
                self.seen.add((kind, before.task.id))
                self.found.append((kind, rescored.step, before, after))

    def chosen(self) -> list[tuple[str, int, Rollout, Rollout]]:
        """As many of each kind as fit, by kind in the order of `FLIPS`."""
        by_kind = sorted(self.found, key=lambda one: FLIPS.index(one[0]))
        turns = in_turns(by_kind, lambda one: one[0])
        return sorted(turns[: self.most], key=lambda one: FLIPS.index(one[0]))


def row(label: Any, change: ScoreChange) -> list[Any]:
    """A line of the table: means, shares of rollouts, shares of groups."""
    rollouts = max(1, change.rollouts)
    groups = max(1, change.groups)
    shares = [count / rollouts if count else 0 for count in change.flips.tolist()]
    same = [count / groups for count in change.same.tolist()]
    if change.compared:
        opposed = change.opposed / change.compared
    else:
        opposed = None
    return [label, change.rollouts, *change.mean_rewards, *shares, *same, change.correlation, opposed]


def table(console: Console, title: str, rows: Sequence[tuple[int, ScoreChange]]) -> None:
    """A line per step, of many per few neighbouring steps, and one for all of them."""
    # Ceiling division: at most LINES lines.
    size = -(-len(rows) // LINES)
    shown = []
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        if len(part) == 1:
            label = str(part[0][0])
        else:
            label = f"{part[0][0]}-{part[-1][0]}"
        shown.append(row(label, sum((change for _, change in part), ScoreChange())))
    if len(rows) > 1:
        shown.append(row("all", sum((change for _, change in rows), ScoreChange())))
    console.table(title, COLUMNS, shown)


def examples(console: Console, found: Examples) -> None:
    """Prompt, completion, and both verdicts with their reasons."""
    for kind, step, before, after in found.chosen():
        console.message("")
        console.message(f"{kind}: step {step}, task {before.task.id}, group {before.group}, member {before.member}")
        console.message(f"  prompt: {_cut(prompt_text(before.task.prompt))}")
        console.message(f"  completion: {_cut(before.text)}")
        if before.task.answer is not None:
            console.message(f"  answer of the task: {_cut(str(before.task.answer))}")
        console.message(f"  recorded: {_verdict(before.verdict)}")
        console.message(f"  rescored: {_verdict(after.verdict)}")


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return "no verdict"
    if verdict.score is None:
        score = "undecided"
    else:
        score = f"{verdict.score:.4g}"
    if verdict.answer is None:
        answer = ""
    else:
        answer = f", answer {_cut(verdict.answer)!r}"
    return f"{verdict.status}, {score}{answer}" + (f": {_cut(verdict.reason)}" if verdict.reason else "")


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT // 2]} [...] {text[-TEXT // 2 :]}"
