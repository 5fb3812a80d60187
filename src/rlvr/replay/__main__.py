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
from pathlib import Path
from typing import IO

from rlvr.core.own_files import check_output, first_keys
from rlvr.errors import ConfigError, command
from rlvr.monitor.console import Console
from rlvr.monitor.whole_file import naming
from rlvr.replay.changes import ScoreChange
from rlvr.replay.rescore import Replay, row_of
from rlvr.replay.show import Examples, examples, table

REPLAY_KEYS = {"step", "use", "id", "task", "group", "member", "before", "after"}
"""Keys of a line of the output."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    replay = Replay(options.run, options.rescore, *_steps(options.steps))
    with contextlib.ExitStack() as stack:
        # Round the file: a full disk is noticed by a write or by the close, and neither names it.
        stack.enter_context(naming(options.output or ""))
        if options.output:
            sink = stack.enter_context(_sink(options.output, Path(options.run)))
        else:
            sink = None
        asyncio.run(_replay(replay, Examples(options.examples), sink))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlvr.replay", description="Score recorded rollouts again.")
    parser.add_argument("run", metavar="RUN", help="a run folder with recorded rollouts")
    parser.add_argument(
        "--rescore",
        nargs="+",
        default=[],
        metavar="key=value",
        help="verifier=..., rewards=..., laid over the run's own",
    )
    parser.add_argument(
        "--steps", default=":", metavar="A:B", help="steps A to B; either may be left out (default: all)"
    )
    parser.add_argument(
        "--examples", type=int, default=6, metavar="N", help="changed rollouts that are shown (default 6)"
    )
    parser.add_argument(
        "--output", metavar="FILE.jsonl", help="every rollout before and after; an earlier output there is replaced"
    )
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
    check_output(path, lambda head: first_keys(head) == REPLAY_KEYS, "an output of rlvr.replay")
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
    if replay.verifies:
        what = "verified and rewarded again"
    else:
        what = "rewarded again, verdicts as recorded"
    table(console, f"{replay.run}: {what} (shares of rollouts and of groups)", rows)
    examples(console, chosen)
    for note in dict.fromkeys(replay.notes):
        console.message(note, "warning")
    if sink is not None:
        console.message(f"every rollout before and after: {sink.name}")


if __name__ == "__main__":
    sys.exit(main())
