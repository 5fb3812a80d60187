"""Files that rlvr wrote, told from those of the user: only the former are ever removed or replaced.

Invariants: what is not recognised is left where it is, or renamed, never removed; nothing is reached through a symbolic
link.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import yaml

from rlvr.core.tree import read_mapping
from rlvr.errors import ConfigError

SECTIONS = frozenset({"run", "model", "data", "rollout", "algorithm", "optim", "checkpoint", "logging"})
"""Sections that the resolved configuration of every version has; a file that a person wrote hardly names them all."""
HEAD = 1 << 20
"""Bytes of a result that are read to tell whose it is: a row with a long completion fits."""


def is_run_config(path: Path) -> bool:
    """Return True if `path` is a configuration as a run writes it: complete, and as the YAML writer lays it out."""
    try:
        tree = read_mapping(path)
    except (OSError, ConfigError):
        return False
    # Folders of earlier versions count, whose configuration lacks newer sections.
    complete = all(isinstance(tree.get(name), dict) for name in SECTIONS)
    return complete and {"name", "dir"} <= tree["run"].keys()


def is_verbatim(path: Path) -> bool:
    """Return True if the YAML file `path` is as a program wrote it, so that its comments and layout are nobody's
    work."""
    try:
        text = path.read_text(encoding="utf-8")
        # The round trip drops comments, quotes and line breaks of a person's: where it changes nothing, there were
        # none.
        return text == yaml.safe_dump(yaml.safe_load(text), sort_keys=False, allow_unicode=True)
    except (OSError, ValueError, yaml.YAMLError):
        return False


def free_path(folder: Path, prefix: str) -> Path:
    """A path `PREFIXTIME` in `folder` that nothing has. Such names sort by time (UTC)."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    free = folder / f"{prefix}{stamp}"
    number = 2
    while os.path.lexists(free):
        # Two in one second; `.2` sorts behind the name without it.
        free = folder / f"{prefix}{stamp}.{number}"
        number += 1
    return free


def set_aside(path: Path) -> Path:
    """Rename `path` to `NAME.old-TIME`; the new path. OSError where it cannot be renamed, as a mount point."""
    free = free_path(path.parent, f"{path.name}.old-")
    # One call within a folder, so on one disk: it is renamed whole or not at all.
    os.rename(path, free)
    return free


def numbered(folder: Path, suffix: str = "") -> dict[int, Path]:
    """The regular files (with a `suffix`) or the folders (without) `step-N` of `folder` by N, in order."""
    by_number = {}
    for path in folder.glob(f"step-*{suffix}"):
        # `step-12` and `step-000012.jsonl`; not `step-12.partial`, `step-12-copy` or `step-latest`.
        match = re.fullmatch(rf"step-(\d+){re.escape(suffix)}", path.name)
        # Through a link a removal would reach files elsewhere.
        if match and not path.is_symlink() and (path.is_file() if suffix else path.is_dir()):
            by_number[int(match[1])] = path
    return dict(sorted(by_number.items()))


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove the regular files `names` (relative) of `folder` in this order, then the folders that this left empty,
    `folder` included. Everything else stays."""
    inside = folder.resolve()
    emptied = {folder}
    for name in names:
        file = folder / name
        # A folder on the way may be a link, or the name may hold `..`: the place that it leads to has to be inside.
        if file.is_file() and not file.is_symlink() and file.resolve().is_relative_to(inside):
            file.unlink()
            emptied |= {parent for parent in file.parents if parent.is_relative_to(folder)}
    # The deepest first: a folder is empty once those in it are gone.
    for parent in sorted(emptied, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):  # not empty: something there is not ours
            parent.rmdir()


def check_new_folder(path: Path, what: str) -> None:
    """ConfigError where `path` is there and no empty folder."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty: give a new folder for {what}")


def check_output(path: Path, is_ours: Callable[[str], bool], what: str) -> None:
    """ConfigError where `path` is a file and `is_ours` does not know the head of its text: a file of the user's; also
    where nothing can be written to it: a folder, a path below a file, or a folder without the right to write."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give the path of a file")
    above = next((parent for parent in path.parents if os.path.lexists(parent)), Path())
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be written: {above} is not a folder")
    if not path.exists() and not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: there is no right to write to {above.absolute()}")
    if not path.is_file():  # /dev/stdout and pipes are written to as they are
        return
    try:
        with path.open(encoding="utf-8") as file:
            head = file.read(HEAD)
    except (OSError, ValueError):
        # No text, so nothing that rlvr writes: refused below as a file of the user's.
        head = "?"
    if head and not is_ours(head):
        raise ConfigError(f"{path} exists and is not {what} of rlvr: choose another file, or remove it first")


def first_keys(head: str) -> set[str]:
    """The keys of the JSON object on the first line of a text; none where there is no such object."""
    try:
        row = json.loads(head.partition("\n")[0])
    except ValueError:
        return set()
    return set(row) if isinstance(row, dict) else set()
