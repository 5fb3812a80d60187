"""The name under which a command was started, for its usage line, and an option that several commands have."""

from __future__ import annotations

import argparse
import sys


def program(command: str) -> str:
    """`rlvr COMMAND` where the console command `rlvr` runs it, else `python -m rlvr.COMMAND`."""
    # Set by rlvr.__main__.
    by_console = sys.argv[0].startswith("rlvr ")
    return f"rlvr {command}" if by_console else f"python -m rlvr.{command}"


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add the option `--import`, whose values become `imports`."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="a file or module that registers components of the run, such as rewards; may be repeated",
    )
