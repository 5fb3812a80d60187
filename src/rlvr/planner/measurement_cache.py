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
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import transformers

import rlvr
from rlvr.core.cache_folder import cache_folder
from rlvr.monitor.whole_file import write_whole

MEASURED = ("policy", "planner")
"""Packages of this library whose code is measured or measures."""


def kept(model: type, identity: str, shape: tuple[int, ...], measure: Callable[[], np.ndarray]) -> np.ndarray:
    """The result of `measure`, int64 of `shape`, of this run or of an earlier one.

    `identity`: all settings in words, the same in every process. Nothing is kept of a class outside transformers, whose
    code may be in files that are not known here.
    """
    if not model.__module__.startswith("transformers."):
        return measure()
    try:
        source = _digest(Path(inspect.getfile(model)))
        written = json.dumps([model.__qualname__, identity, _versions(), source, _own_code()])
        name = hashlib.sha256(written.encode()).hexdigest()[:32]
        path = cache_folder() / "decoder_memory" / f"{name}.json"
    except OSError:  # a user without a home; sources that cannot be read
        return measure()
    result = _read(path, written, shape)
    if result is None:
        result = measure()
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({"measured": written, "bytes": result.tolist()}))
    return result


def _read(path: Path, written: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The array in the file; None where there is none, or another one."""
    try:
        row = json.loads(path.read_bytes())
        result = np.asarray(row["bytes"], dtype=np.int64)
        return result if row["measured"] == written and result.shape == shape else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _versions() -> list[str]:
    return [torch.__version__, transformers.__version__, *map(_version, ("peft", "flash-attn"))]


def _version(package: str) -> str:
    """The version of a package, without its import: peft's takes seconds. Empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def _own_code() -> str:
    """A digest of the code of this library that is measured or measures."""
    root = Path(rlvr.__file__).parent
    digests = [_digest(path) for package in MEASURED for path in sorted((root / package).rglob("*.py"))]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
