"""Checkpoints on disk: what one is, which may be used, and how it is read without running code.

`step-N/` holds `model/` (Hugging Face files), `tensors-R.safetensors` of each rank R (weights that train, optimizer,
reference), `state.json` (everything else) and `complete.json`: the format's number, the step and its metrics, the number of
ranks, the versions of what wrote it, and a checksum of every other file. `checkpoint_writer` writes them.

Invariants: a folder named `step-N` is whole, or it is passed over in words; a tensor's name means the same whatever backend
and number of ranks wrote it, so that any other can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlvr.errors import CheckpointError

log = logging.getLogger(__name__)
SEAL, STATE = "complete.json", "state.json"
FORMAT = 2


@dataclass
class Seal:
    """What `complete.json` says."""

    step: int
    ranks: int
    metrics: dict[str, Any]
    """The step's record."""
    versions: dict[str, str]
    files: dict[str, str]
    """File -> checksum."""
    format: int = FORMAT
    own: str = ""
    """The checksum of all this."""

    def text(self) -> str:
        """As it is written, with its own checksum."""
        return json.dumps({**dataclasses.asdict(self), "own": self._checksum()}, indent=1)

    @property
    def whole(self) -> bool:
        """Whether it is as it was written."""
        return self.own == self._checksum()

    def _checksum(self) -> str:
        rest = {**dataclasses.asdict(self), "own": ""}
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Saved:
    """A checkpoint that was read."""

    path: Path
    seal: Seal
    state: dict[str, Any]
    tensors: Tensors


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of all ranks' files by name, each read when it is asked for. CheckpointError for files that are none."""

    def __init__(self, files: list[Path]) -> None:
        self._of: dict[str, Any] = {}
        for path in files:
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
            self._of |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._of[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def load(path: Path) -> Saved:
    """Read a checkpoint. CheckpointError says what is wrong with a torn or foreign one."""
    if (problem := why_unusable(path)) is not None:
        raise CheckpointError(f"{path} cannot be used: {problem}")
    return read(path)


def read(path: Path) -> Saved:
    """Read a checkpoint whose checksums were compared."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return Saved(path, _seal(path), state, Tensors(sorted(path.glob("tensors-*.safetensors"))))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, whole or torn."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`; torn ones are passed over with a warning.

    CheckpointError when there is none, but one in another format: to begin again would throw it away.
    """
    foreign = None
    for path in reversed(checkpoints(folder)):
        if (problem := why_unusable(path)) is None:
            return path
        log.warning("checkpoint %s is passed over: %s", path, problem)
        foreign = foreign or (f"{path} cannot be used: {problem}" if _of_another_format(path) else None)
    if foreign is not None:
        raise CheckpointError(foreign)
    return None


def why_unusable(path: Path) -> str | None:
    """What is wrong with a checkpoint in words, None when it is whole and of this format."""
    try:
        seal = _seal(path)
    except CheckpointError as error:
        return str(error)
    for name, checksum in seal.files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if checksum_of(file) != checksum:
            return f"{name} is damaged (its checksum differs)"
    return None


def _seal(path: Path) -> Seal:
    """What `complete.json` says; CheckpointError in words that go on a sentence about the checkpoint."""
    try:
        seal = json.loads((path / SEAL).read_text(encoding="utf-8"))
        if isinstance(seal, dict) and seal.get("format") == FORMAT:
            seal = Seal(**seal)
            if seal.whole:
                return seal
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    if (number := _of_another_format(path)) is not None:
        raise CheckpointError(
            f"it is in format {number}, and this version of rlvr reads format {FORMAT}: go on with the version that wrote it, "
            "or start a new run from its model/ (model.path)"
        )
    raise CheckpointError(f"it was not finished ({SEAL} is missing or broken)")


def _of_another_format(path: Path) -> int | None:
    """The number of the format, where the checkpoint is whole in another one."""
    with contextlib.suppress(OSError, ValueError):
        seal = json.loads((path / SEAL).read_text(encoding="utf-8"))
        if isinstance(seal, dict) and "tensors.pt" in seal and "format" not in seal:
            return 1
        if isinstance(seal, dict) and isinstance(seal.get("format"), int) and seal["format"] != FORMAT:
            return int(seal["format"])
    return None


def score_of(path: Path, metric: str) -> float | None:
    """The value of a metric at the step of a checkpoint; None where it was not computed or the checkpoint is none."""
    try:
        value = _seal(path).metrics.get(metric)
    except CheckpointError:
        return None
    return float(value) if isinstance(value, (int, float)) else None


def best(folder: Path, metric: str, mode: str) -> tuple[Path, float] | None:
    """The checkpoint in `folder` with the best value of `metric` (`mode` max or min), the older one of equals."""
    scored = [(path, value) for path in checkpoints(folder) if (value := score_of(path, metric)) is not None]
    sign = 1 if mode == "max" else -1
    return max(scored, key=lambda one: sign * one[1], default=None)


def remove_old(folder: Path, newest: Path, keep: int, also: Path | None) -> None:
    """Remove all but the newest `keep` checkpoints, `newest` being one of them, and `also`."""
    others = [path for path in checkpoints(folder) if path != newest]  # a torn one may have a higher number
    for old in others[: max(0, len(others) + 1 - keep)]:
        if old != also:
            shutil.rmtree(old)


def checksum_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
