"""The name under which a command was started, for its usage line."""

from __future__ import annotations

import sys


def program(command: str) -> str:
    """`rlvr COMMAND` where the console command `rlvr` runs it, else `python -m rlvr.COMMAND`."""
    # Set by rlvr.__main__.
    by_console = sys.argv[0].startswith("rlvr ")
    return f"rlvr {command}" if by_console else f"python -m rlvr.{command}"
