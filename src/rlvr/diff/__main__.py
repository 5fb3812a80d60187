"""python -m rlvr.diff RUN_A RUN_B [--tolerance X]

Finds where two runs part: the first configuration key, the first step whose recorded rollouts differ with the token,
the first step whose metrics differ, the first checkpoint that differs with the tensor. Metrics of the clock (times,
throughput) are left out, and so are keys of the configuration that do not change what is learned.

Exit codes: 0 the runs are equal as far as both go, 1 they part, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlvr.config.renamed_keys import with_new_names
from rlvr.core.command_name import program
from rlvr.core.startup_lines import StartupLines
from rlvr.diff.parting import Parting, compare_metrics
from rlvr.errors import ConfigError, DataError, command
from rlvr.monitor.console import Console
from rlvr.monitor.recording import recorded_config

KEYS = 6
"""Configuration keys that are named."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    if not options.tolerance >= 0:
        raise ConfigError(f"--tolerance is {options.tolerance}: it must be 0 or more")
    a, b = (Path(run) for run in options.runs)
    for run in (a, b):
        if not run.is_dir():
            raise DataError(f"{run} is a file, not a run folder" if run.exists() else f"there is no run folder {run}")
    StartupLines("auto", sys.stderr).say(f"comparing {a} and {b}")
    # Torch comes with them, which --help and a misspelt path do not need.
    from rlvr.diff.rollouts import compare_rollouts
    from rlvr.diff.tensors import compare_checkpoints
    from rlvr.run.run_folder import differences

    notes: list[str] = []
    # In the order of cause and effect within a step: rollouts are sampled, metrics follow, a checkpoint is last.
    compare = (compare_rollouts, compare_metrics, compare_checkpoints)
    partings = [one(a, b, options.tolerance, notes) for one in compare]
    if not any(one.compared for one in partings):
        why = "".join(f"\n  {note}" for note in dict.fromkeys(notes))
        raise DataError(f"{a} and {b} have no finished step in common: there is nothing to compare{why}")
    return _print_result(
        Console(),
        list(differences(with_new_names(recorded_config(a)), with_new_names(recorded_config(b)))),
        partings,
        notes,
    )


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("diff"), description="Find where two runs part.")
    add = parser.add_argument
    add("runs", nargs=2, metavar="RUN", help="a run folder")
    add(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="numbers are equal up to X times the larger of them and 1 (default 0: exactly)",
    )
    return parser


def _print_result(console: Console, keys: Sequence[str], partings: Sequence[Parting], notes: Sequence[str]) -> int:
    console.message("config: " + ("differs in" if keys else "the same in all that changes what is learned"))
    for key in [*keys[:KEYS], *([f"and {len(keys) - KEYS} more keys"] if len(keys) > KEYS else [])]:
        console.message(f"  {key}")
    for one in partings:
        if not one.compared:
            console.message(f"{one.what}: none in common")
        elif one.step is None:
            console.message(f"{one.what}: equal in all steps that both have ({one.compared})")
        else:
            console.message(f"{one.what}: part at step {one.step}")
            for line in one.lines:
                console.message(f"  {line}")
    for note in dict.fromkeys(notes):
        console.message(note, "warning")
    parted = [(one.step, place) for place, one in enumerate(partings) if one.step is not None]
    if not parted:
        console.message("the runs are equal as far as both go")
        return 0
    # By step, then by the order above.
    step, place = min(parted)
    console.message(f"the runs part at step {step}, first in their {partings[place].what}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
