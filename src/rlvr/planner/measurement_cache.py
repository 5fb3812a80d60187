"""Measured bytes of decoders, kept in the user's cache folder: each start of a run would measure them again, which
takes seconds.

Invariants: what is kept depends on everything that is measured (model, settings, versions of the libraries, source code
of the model and of this library); a file is whole or not there, and one that cannot be read, or a folder that cannot be
written to, costs the time of measuring.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

import rlvr
from rlvr.core.cache_folder import cache_folder

MEASURED = ("policy", "planner")
"""Packages of this library whose code is measured or measures."""


def kept(model: type, identity: str, measure: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """The result of `measure`, of this run or of an earlier one.

    `identity`: all settings in words, the same in every process. Nothing is kept of a class outside transformers, whose
    code may be in files that are not known here.
    """
    if not model.__module__.startswith("transformers."):
        return measure()
    written = json.dumps(
        [model.__qualname__, identity, _versions(), _digest(Path(inspect.getfile(model))), _own_code()]
    )
    try:
        name = hashlib.sha256(written.encode()).hexdigest()[:32]
        path = cache_folder() / "decoder_memory" / f"{name}.json"
    except FileNotFoundError:  # a user without a home
        return measure()
    result = _read(path, written)
    if result is None:
        result = measure()
        _write(path, written, result)
    return result


def _read(path: Path, written: str) -> list[np.ndarray] | None:
    """The arrays in the file; None where there is none, or another one."""
    try:
        row = json.loads(path.read_bytes())
        if row["measured"] == written:
            return [np.asarray(array, dtype=np.int64) for array in row["bytes"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _write(path: Path, written: str, result: list[np.ndarray]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "w") as file:
            json.dump({"measured": written, "bytes": [array.tolist() for array in result]}, file)
        # Whole or not at all, also where two runs write it.
        os.replace(name, path)


def _versions() -> list[str]:
    # Without an import of peft, which takes seconds (it loads bitsandbytes).
    return [torch.__version__, transformers.__version__, version("peft")]


@functools.cache
def _own_code() -> str:
    """A digest of the code of this library that is measured or measures."""
    root = Path(rlvr.__file__).parent
    digests = [_digest(path) for package in MEASURED for path in sorted((root / package).rglob("*.py"))]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
