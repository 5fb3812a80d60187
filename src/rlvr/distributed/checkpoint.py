"""Checkpoints on disk: what one is, which may be used, and how it is read without running code.

`step-N/` holds `model/` (Hugging Face files), `tensors-R.safetensors` of each rank R (weights that train, optimizer,
reference), `state.json` (everything else) and `complete.json`: the format's number, the step and its metrics, the
number of ranks, the versions of what wrote it, and a checksum of every other file. `checkpoint_writer` writes them.

Invariants: a folder named `step-N` is whole, or it is passed over in words; a tensor's name means the same whatever
backend and number of ranks wrote it, so that any other can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlvr.core.own_files import remove_files, set_aside
from rlvr.errors import CheckpointError

log = logging.getLogger(__name__)
MANIFEST = "complete.json"
STATE = "state.json"
# 1 was a pickled tensors.pt (see `_of_another_format`), which is not read: unpickling runs code.
FORMAT = 2
# Matches "tensors-3.safetensors.note.tmp", "model/model-00001-of-00002.safetensors", "merged/chat_template.jinja",
# "model/modeling_llama.py"; not "model/notes.txt", "../state.json" or "tensors-3.safetensors.bak". Used with fullmatch,
# so that a file of the user's is not removed.
PARTIAL = (
    r"tensors-\d+\.safetensors(\.note|\.tmp|\.note\.tmp)?|state\.json|complete\.json|"
    r"(model|merged)/([a-z_]*model[\w.-]*\.(safetensors|model|json)|[a-z_]*(config|tokenizer|tokens|tokens_map"
    r"|vocab)\.json|"
    r"(tokenizer|spiece|sentencepiece\.bpe)\.model|merges\.txt|vocab\.txt|(additional_chat_templates/\w+"
    r"|chat_template)\.jinja|"
    r"README\.md|(configuration|modeling|tokenization)_\w+\.py)"
)
"""Names, relative, of files that a checkpoint is made of: ours, and those that transformers, peft and tokenizers
write."""


@dataclass
class Manifest:
    """The content of `complete.json`."""

    step: int
    ranks: int
    metrics: dict[str, Any]
    """The step's record."""
    versions: dict[str, str]
    files: dict[str, str]
    """File -> checksum."""
    format: int = FORMAT
    models: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Frozen model -> where it is from: path, revision and the hash of its configuration file, or url and name."""
    own: str = ""
    """The checksum of all this."""

    def text(self) -> str:
        """As it is written, with its own checksum."""
        return json.dumps({**self._content(), "own": self._checksum()}, indent=1)

    @property
    def whole(self) -> bool:
        """Return True if it is as it was written."""
        return self.own == self._checksum()

    def _content(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        if not self.models:
            # As manifests were before there were any.
            del content["models"]
        return content

    def _checksum(self) -> str:
        # Sorted keys: the sum is of the content, whatever order a reader's dictionary has. 32 hexadecimal digits are
        # 128 bits.
        rest = {**self._content(), "own": ""}
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class Saved:
    """A checkpoint that was read."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]
    tensors: Tensors


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of all ranks' files by name, each read when it is asked for. CheckpointError for files that are
    none."""

    def __init__(self, files: list[Path]) -> None:
        self._of: dict[str, Any] = {}
        for path in files:
            try:
                # Maps the file and reads a tensor when it is asked for; the format holds no code.
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
    return Saved(path, _manifest(path), state, Tensors(sorted(path.glob("tensors-*.safetensors"))))


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, whole or torn."""
    # "step-40" is a checkpoint; "step-40.partial", "step-best" and ".step-40.partial" are not
    paths = (path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`; torn ones are passed over with a warning. None where there are none at
    all.

    CheckpointError where one in another format is newer, and where none can be used, with the reason of each: to begin
    again would throw their steps away.
    """
    problems: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(folder)):
        # Newest first, and the sums of the newest only where it is whole: summing 100 GB takes minutes.
        if (problem := why_unusable(path)) is None:
            for torn, why in problems:
                log.warning("checkpoint %s is passed over: %s", torn, why)
            return path
        problems.append((path, problem))
        if _of_another_format(path) is not None:
            break  # whole in another version: to go on from an older one would do its steps again
    if problems:
        reasons = "; ".join(f"{path} cannot be used: {problem}" for path, problem in problems)
        before = (path for path in reversed(checkpoints(folder)) if step_of(path) < step_of(problems[-1][0]))
        older = next((path for path in before if why_unusable(path) is None), None)
        raise CheckpointError(reasons if older is None else f"{reasons}. {older} can be used, by its own name")
    return None


def model_folder(path: str) -> Path | str:
    """The folder of the model: that of a checkpoint or of the newest whole checkpoint of a run, where `path` is one;
    else `path` itself."""
    folder = Path(path)
    if (folder / "model").is_dir():
        return folder / "model"
    newest = latest(folder / "checkpoints")
    return path if newest is None else newest / "model"


def why_unusable(path: Path) -> str | None:
    """Return the problem of a checkpoint in words, None when it is whole and of this format."""
    try:
        manifest = _manifest(path)
    except CheckpointError as error:
        return str(error)
    for name, checksum in manifest.files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        # All bytes are read: a file of the right size may still hold zeros after a crash of its machine.
        if checksum_of(file) != checksum:
            return f"{name} is damaged (its checksum differs)"
    return None


def _manifest(path: Path) -> Manifest:
    """Return the contents of `complete.json`. CheckpointError in words that go on a sentence about the checkpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
            # TypeError for keys that this version does not have, which is caught as "broken".
            manifest = Manifest(**manifest)
            if manifest.whole:
                return manifest
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    if (number := _of_another_format(path)) is not None:
        raise CheckpointError(
            f"it is in format {number}, and this version of rlvr reads format {FORMAT}: go on with the version that "
            "wrote it, or start a new run from its model/ (model.path)"
        )
    raise CheckpointError(f"it was not finished ({MANIFEST} is missing or broken)")


def _of_another_format(path: Path) -> int | None:
    """The number of the format, where the checkpoint is whole in another one."""
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        # Format 1 had no number: its manifest was the mapping of files to checksums itself.
        if isinstance(manifest, dict) and "tensors.pt" in manifest and "format" not in manifest:
            return 1
        if isinstance(manifest, dict) and isinstance(manifest.get("format"), int) and manifest["format"] != FORMAT:
            return int(manifest["format"])
    return None


def score_of(path: Path, metric: str) -> float | None:
    """The value of a metric at the step of a checkpoint; None where it was not computed or the checkpoint is none."""
    try:
        value = _manifest(path).metrics.get(metric)
    except CheckpointError:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return None


def best(folder: Path, metric: str, mode: str) -> tuple[Path, float] | None:
    """The checkpoint in `folder` with the best value of `metric` (`mode` max or min), the older one of equals."""
    scored = [(path, value) for path in checkpoints(folder) if (value := score_of(path, metric)) is not None]
    sign = 1 if mode == "max" else -1
    # `max` keeps the first of equals, and `checkpoints` gives the oldest first.
    return max(scored, key=lambda one: sign * one[1], default=None)


def remove_old(folder: Path, newest: Path, keep: int, also: Path | None, every: int = 0) -> None:
    """Remove all but the newest `keep` checkpoints, `newest` being one of them, and `also`.

    With `every`, the `keep` are counted among those at its multiples; of others, `kept_between` stay, and only while
    they are newer. What has no manifest of ours is neither counted nor removed: a folder of the user's, or one that is
    torn.
    """
    sealed = [path for path in checkpoints(folder) if path != newest and is_sealed(path)]
    sealed.append(newest)  # a damaged one may have a higher number
    regular = [path for path in sealed if every == 0 or step_of(path) % every == 0]
    last = step_of(regular[-1]) if regular else 0
    between = [path for path in sealed if path not in regular and step_of(path) > last]
    kept = {newest, also, *regular[-keep:], *between[-kept_between(keep) :]}
    for path in sealed:
        if path not in kept:
            remove(path)


def kept_between(keep: int) -> int:
    """The number of checkpoints that are kept between two that fall on multiples of `every`."""
    return min(2, keep)


def remove(path: Path) -> None:
    """Remove the files of a checkpoint that its manifest names; others stay, and the folders that hold them.

    CheckpointError where it has no manifest.
    """
    remove_files(
        path, [*_manifest(path).files, MANIFEST]
    )  # the manifest last: a kill in between leaves a folder known as ours


def remove_partial(path: Path) -> None:
    """Remove what a checkpoint writes from a folder that one was being written into; the folder with all else is set
    aside."""
    if path.is_dir() and not path.is_symlink():
        # Only names that a checkpoint has: the folder could be one that a user keeps things in.
        names = (file.relative_to(path).as_posix() for file in path.rglob("*"))
        remove_files(path, [name for name in names if re.fullmatch(PARTIAL, name)])
    for folder in (path / "model", path / "merged", path):
        if folder.is_dir() and not folder.is_symlink():
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
    if os.path.lexists(path):
        set_aside(path)


def replace(path: Path, new: Path) -> None:
    """Put the checkpoint `new` in the place of `path`, where there may be one: that is removed, anything else set
    aside."""
    # os.replace does not replace a folder that is not empty.
    old = set_aside(path) if os.path.lexists(path) else None
    os.replace(new, path)
    if old is not None and is_sealed(old):
        remove(old)


def is_sealed(path: Path) -> bool:
    """Return True if `path` is a folder that a checkpoint was written to, be it damaged since."""
    with contextlib.suppress(CheckpointError):
        return not path.is_symlink() and bool(_manifest(path).files)
    return False


def checksum_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        # Read in blocks, with the interpreter's lock released, so that heartbeats go on.
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
