"""rlvr new FOLDER: write a run.yaml, a check.py and tasks that train on a CPU in about a minute, to change into yours.

Exit codes: 0 done, 2 bad input, such as a folder that is not empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from rlvr.core.command_name import program
from rlvr.core.own_files import check_new_folder
from rlvr.errors import ConfigError, chosen_place, command

TRAIN = 400
HELD_OUT = 128
"""Numbers of tasks in the two files."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    # An unset variable of a shell; the current folder is `.`.
    if not options.folder:
        raise ConfigError("rlvr new: the name of the folder is empty: give one, or . for the current folder")
    if not options.folder.isprintable():
        raise ConfigError(f"rlvr new: the folder {options.folder!r} has a control character in its name")
    folder = Path(options.folder)
    with chosen_place(str(folder), "another folder"):
        write_task(folder)
    print(f"{folder}: run.yaml, check.py, tasks.jsonl, held_out.jsonl")
    # The paths in run.yaml are relative to the folder that a run is started in.
    print(f"next: cd {shlex.quote(str(folder))} && {program('train')} --config run.yaml")
    return 0


def write_task(folder: Path) -> None:
    """Write the files of the small task. ConfigError where the folder is not empty, OSError where it cannot be
    made."""
    check_new_folder(folder, "a new task")
    folder.mkdir(parents=True, exist_ok=True)
    template = resources.files("rlvr.new") / "template"
    for name in ("run.yaml", "check.py"):
        (folder / name).write_text((template / name).read_text(encoding="utf-8"), encoding="utf-8")
    numbers = ["".join(digits) for digits in itertools.product("0123456789", repeat=3)]
    random.Random(0).shuffle(numbers)
    _write_tasks(folder / "tasks.jsonl", numbers[:TRAIN])
    _write_tasks(folder / "held_out.jsonl", numbers[TRAIN : TRAIN + HELD_OUT])


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog=program("new"), description="Make a folder with a small task that trains on a CPU."
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new or empty folder")
    return parser


def _write_tasks(path: Path, numbers: Iterable[str]) -> None:
    """A row for each number; the demonstrations of every second one are in falling order, which is not the answer."""
    rows = []
    for at, number in enumerate(numbers):
        answer = "".join(sorted(number))
        rows.append({"prompt": f"{number}>", "answer": answer, "demonstration": answer[::-1] if at % 2 else answer})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
