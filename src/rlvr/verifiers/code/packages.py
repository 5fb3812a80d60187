"""Packages beyond the standard library that a task's programs may have: those of the trainer's own interpreter, by
name."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

PACKAGES = ("numpy",)
"""Packages that a task may name. Others may hold data (tests, benchmarks) or start threads, which a zygote cannot
have."""
PLACE = "/packages"
"""Folder of these packages inside of a sandbox that has a file system of its own."""


@functools.cache
def paths_of(package: str) -> tuple[Path, ...]:
    """The folders of a package: itself and its shared libraries. Empty where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    # Wheels for Linux keep their shared libraries beside the package (`numpy.libs`, made by auditwheel).
    libraries = folder.parent / f"{package}.libs"
    if libraries.is_dir():
        return (folder, libraries)
    return (folder,)
