"""Where the docs are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def script(root) -> Iterator[Callable[[str], ModuleType]]:
    """`script("make_docs")`: scripts/make_docs.py as a fresh module."""

    def load(name: str) -> ModuleType:
        path = root / f"scripts/{name}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        # As Python does it for a script, which may import files beside it.
        patch.syspath_prepend(root / "scripts")
        yield load
