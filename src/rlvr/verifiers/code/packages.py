"""Packages beyond the standard library that a task's programs may have: those of the trainer's own interpreter, by
name."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

PACKAGES = ("numpy",)
"""What a task may name. Others may hold data (tests, benchmarks) or start threads, which a zygote cannot have."""
PLACE = "/packages"
"""Where they are found inside of a sandbox that has a file system of its own."""


@functools.cache
def paths_of(package: str) -> tuple[Path, ...]:
    """The folders of a package: itself and its shared libraries. Empty where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return ()
    folder = Path(next(iter(found.submodule_search_locations))).resolve()
    libraries = folder.parent / f"{package}.libs"
    if libraries.is_dir():
        return (folder, libraries)
    return (folder,)
