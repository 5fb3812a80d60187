"""python -m rlvr.report RUN [RUN ...] [--output FILE] [--rollouts N]

Writes one HTML page of one run folder or several: curves, evaluations, what the monitors found, where the time went,
and a browser of rollouts. It needs nothing beside it, works without a network, and may be written while the run goes
on.

Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlvr.core.command_name import program
from rlvr.core.startup_lines import StartupLines
from rlvr.errors import command
from rlvr.report.page import SHOWN, write_report


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.rollouts < 0:
        parser.error("--rollouts is a number from 0 on")
    mode = "auto" if sys.stderr.isatty() else "off"
    StartupLines(mode, sys.stderr).say(f"reading {', '.join(options.runs)}")
    path = write_report(options.runs, options.output, options.rollouts)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("report"), description="Write an HTML page of runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument("--output", metavar="FILE", help="where the page goes (default: report.html of the first run)")
    parser.add_argument(
        "--rollouts", type=int, default=SHOWN, metavar="N", help=f"rollouts that the page shows (default {SHOWN})"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
