"""python -m rlvr.replay RUN [--rescore verifier=NAME verifier.option=VALUE rewards='[...]'] [--steps A:B] [--examples
N] [--output FILE.jsonl]

Scores the recorded rollouts of a run again, with its configuration and what `--rescore` lays over it, and shows what
would change: rewards, verdicts, groups that teach nothing, advantages, and examples. Without `--rescore` the run's own
verifier judges again. `--output` writes every rollout before and after.

Exit codes: 0 done, 2 bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlvr.core.command_name import add_imports, program
from rlvr.core.own_files import check_output, first_keys
from rlvr.core.startup_lines import StartupLines
from rlvr.errors import ConfigError, command
from rlvr.monitor.batch import prompt_text
from rlvr.monitor.console import Console
from rlvr.monitor.console_text import percent
from rlvr.monitor.samples import in_turns
from rlvr.monitor.whole_file import naming
from rlvr.records import Rollout, Verdict
from rlvr.replay.rescore import FLIPS, Replay, Rescored, ScoreChange, flip, row_of

REPLAY_KEYS = {"step", "use", "id", "task", "group", "member", "before", "after"}
"""Keys of a line of the output."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    StartupLines("auto", sys.stderr).say(f"reading the rollouts of {options.run}")
    replay = Replay(options.run, options.rescore, *_steps(options.steps), imports=options.imports)
    with contextlib.ExitStack() as stack:
        # Round the file: a full disk is noticed by a write or by the close, and neither names it.
        stack.enter_context(naming(options.output or ""))
        sink = None
        if options.output:
            sink = stack.enter_context(_sink(options.output, Path(options.run)))
        asyncio.run(_replay(replay, Examples(options.examples), sink))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("replay"), description="Score recorded rollouts again.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder with recorded rollouts")
    add(
        "--rescore",
        nargs="+",
        default=[],
        metavar="key=value",
        help="verifier=..., rewards=..., laid over the run's own",
    )
    add_imports(parser)
    add("--steps", default=":", metavar="A:B", help="steps A to B; either may be left out (default: all)")
    add("--examples", type=int, default=6, metavar="N", help="changed rollouts that are shown (default 6)")
    add("--output", metavar="FILE.jsonl", help="every rollout before and after; an earlier output there is replaced")
    return parser


def _steps(text: str) -> tuple[int, int | None]:
    first, colon, last = text.partition(":")
    try:
        # `5` is one step, `5:` from there on, `:5` up to it.
        begin = int(first) if first else 1
        return begin, (int(last) if last else None) if colon else begin
    except ValueError:
        raise ConfigError(f"--steps {text}: steps are written A:B, A:, :B or A") from None


def _sink(output: str, run: Path) -> IO[str]:
    path = Path(output)
    if run.resolve() / "rollouts" in path.resolve().parents:
        raise ConfigError(f"--output {output} is among the recorded rollouts: choose another place")
    check_output(path, lambda head: first_keys(head) == REPLAY_KEYS, "an output of replay")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output!r} cannot be written: {error}") from error


async def _replay(replay: Replay, chosen: Examples, sink: IO[str] | None) -> None:
    console = Console()
    rows = list[tuple[int, ScoreChange]]()
    async for rescored in replay.steps():
        rows.append((rescored.step, rescored.change))
        chosen.add(rescored)
        if sink is not None:
            lines = (json.dumps(row_of(rescored, place)) + "\n" for place in range(len(rescored.before)))
            sink.writelines(lines)
    what = "rewarded again, verdicts as recorded"
    if replay.verifies:
        what = "verified and rewarded again"
    table(console, f"{replay.run}: {what} (shares of rollouts and of groups)", rows)
    examples(console, chosen)
    for note in dict.fromkeys(replay.notes):
        console.message(note, "warning")
    if sink is not None:
        console.message(f"every rollout before and after: {sink.name}")


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
    # A kind of change that none has is a plain 0: those that happened are seen among seven columns.
    shares = [percent(count / rollouts) if count else 0 for count in change.flips.tolist()]
    same = [percent(count / groups) for count in change.same.tolist()]
    opposed = None
    if change.compared:
        opposed = percent(change.opposed / change.compared) if change.opposed else 0
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
    score = "undecided"
    if verdict.score is not None:
        score = f"{verdict.score:.4g}"
    answer = ""
    if verdict.answer is not None:
        answer = f", answer {_cut(verdict.answer)!r}"
    return f"{verdict.status}, {score}{answer}" + (f": {_cut(verdict.reason)}" if verdict.reason else "")


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT // 2]} [...] {text[-TEXT // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
