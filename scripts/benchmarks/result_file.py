"""The option of a benchmark that names the file of its results: an earlier result of the same script, and no other
file, is replaced, asked before anything is measured; and the head of such a file."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlvr.core.own_files import check_output
from rlvr.errors import ConfigError

PAGE = "Medians of "
"""The beginning of a Markdown page that a script writes beside its results."""


def result_file(*keys: str, page: bool = False) -> Callable[[str], Path]:
    """Return the argparse type of the option. `keys`: those that every result of the script has, and hardly anything
    else; `page`: the script also writes a Markdown page of the same name."""

    def checked(text: str) -> Path:
        path = Path(text)
        try:
            check_output(path, lambda head: set(keys) <= _keys(head), "a result of this benchmark")
            if page:
                check_output(path.with_suffix(".md"), lambda head: head.startswith(PAGE), "the page of this benchmark")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return path

    return checked


def result_head(command: str, *packages: str) -> dict[str, Any]:
    """The head of a result: the command that writes it, in scripts/benchmarks, and the versions of Python, torch and
    `packages`."""
    versions = {name: version(name) for name in ("torch", *packages)}
    return {
        "command": f"python scripts/benchmarks/{command}",
        "versions": {"python": platform.python_version(), **versions},
    }


def _keys(text: str) -> set[str]:
    """The keys of the JSON object in `text`, or of the first one in a list; none where there is no such object."""
    try:
        value = json.loads(text)
    except ValueError:
        return set()
    if isinstance(value, list) and value:
        value = value[0]
    return set(value) if isinstance(value, dict) else set()
