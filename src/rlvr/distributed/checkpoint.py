"""Checkpoints: written aside, synced, renamed; read without running code.

`step-N/` holds `model/` (Hugging Face files), `tensors.pt` (weights that train, optimizer, reference; loaded with
weights_only), `state.json` (everything else) and last `complete.json` with a checksum of each file. Invariant: a folder
named `step-N` is whole, or `latest` passes it over and says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlvr.errors import CheckpointError

log = logging.getLogger(__name__)
SEAL = "complete.json"


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Any],
    save_model: Callable[[Path], None],
    keep: int,
) -> Path:
    """Write `folder`/step-N and remove all but the newest `keep`. Returns the checkpoint's path."""
    target, aside = folder / f"step-{step}", folder / f".step-{step}.partial"
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    save_model(aside / "model")
    torch.save(dict(tensors), aside / "tensors.pt")
    (aside / "state.json").write_text(json.dumps(dict(state)))
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    (aside / SEAL).write_text(json.dumps({str(path.relative_to(aside)): _checksum(path) for path in files}, indent=1))
    for path in [*files, aside / SEAL]:
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    os.replace(aside, target)
    _sync(folder)
    others = [path for path in checkpoints(folder) if path != target]  # a torn one may have a higher number
    for old in others[: max(0, len(others) + 1 - keep)]:
        shutil.rmtree(old)
    return target


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, tensors) of a checkpoint. CheckpointError says what is wrong with a torn one."""
    if (problem := why_torn(path)) is not None:
        raise CheckpointError(f"{path} cannot be used: {problem}")
    try:
        tensors = torch.load(path / "tensors.pt", map_location="cpu", weights_only=True)
        return json.loads((path / "state.json").read_text()), tensors
    except Exception as error:  # whatever torch's restricted unpickler makes of it
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, whole or torn."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`; torn ones are passed over with a warning."""
    for path in reversed(checkpoints(folder)):
        if (problem := why_torn(path)) is None:
            return path
        log.warning("checkpoint %s is passed over: %s", path, problem)
    return None


def why_torn(path: Path) -> str | None:
    """What is wrong with a checkpoint in words, None when it is whole."""
    try:
        sums = dict(json.loads((path / SEAL).read_text()))
    except (OSError, ValueError, TypeError):
        return f"it was not finished ({SEAL} is missing or broken)"
    for name, checksum in sums.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _checksum(file) != checksum:
            return f"{name} is damaged (its checksum differs)"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
