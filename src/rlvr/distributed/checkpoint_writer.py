"""Writing checkpoints: tensors are copied to host memory while the step waits, and a thread does the rest.

Each rank writes its own tensors into a folder aside (`.step-N.partial`) and leaves a note with their checksum there;
rank 0 writes everything else, waits for the notes, writes the manifest, syncs the folder and renames it. So the ranks
need storage that they share, and no collective call is made outside the ranks' main threads.

Invariants: `step-N` appears whole or not at all; what was there before is removed only when the new one is whole; a
write that fails is logged, and neither stops the run nor touches another checkpoint; one write is under way at a
time; a run folder that was removed is not made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlvr.config import CheckpointConfig
from rlvr.core.waits import finished
from rlvr.distributed import checkpoint
from rlvr.distributed.checkpoint import MANIFEST, STATE, Manifest, checksum_of
from rlvr.distributed.world import BarrierWait, World, installed
from rlvr.errors import CheckpointError

log = logging.getLogger(__name__)

# Arbitrary: a terabyte at 300 MB/s.
WRITE_SECONDS = 3600.0
"""Seconds after which a wait for a write ends in an error."""
# Recorded in the manifest to explain a run that differs after a resume; ranks compare a list of their own
# (versions.py).
PACKAGES = ("rlvr", "torch", "transformers", "safetensors", "numpy", "peft")


@dataclass
class Contents:
    """One rank's contents of a checkpoint."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    """This rank's, in host memory."""
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    models: Callable[[Path], None] = lambda folder: None
    """Writes `model/` and its like into a folder. State, metrics and this are rank 0's."""
    frozen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Frozen model -> where it is from, for the manifest."""
    logs: Sequence[Path] = ()
    """Files that a run resumed from here relies on, to be on disk before."""


class HostCopies:
    """Copies of tensors in host memory. The buffers are used again, since new memory costs more than the copying."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A copy of each tensor, good until the next call that gives the same names."""
        return {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Pinned: copies from a GPU then run at the speed of the bus. Pinning costs more than a copy, which is why
            # buffers are kept.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        # Blocking: on return the optimizer may change the tensor.
        return buffer.copy_(tensor)


FAILED = "the checkpoint of step %d could not be written to %s: %s"


class Writer:
    """Writes the checkpoints of one run into `folder`, one at a time."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder = folder
        self.config = config
        self.world = world
        self._under_way: Future[Path] | None = None
        self._step = 0
        self._directory: int | None = None
        """The folder of checkpoints, open on rank 0 while one is written, so that no other folder gets its inode
        number."""

    def open(self, step: int, logs: bool = True) -> bool:
        """Wait for the write before, and make the folder that all ranks write into. Where that is impossible: False,
        the write counts as failed, and with `logs` that is logged."""
        # The write before uses the same host buffers and the same thread name on storage: never two at once.
        self.wait()
        problem = None
        if self.world.is_main:
            try:
                # Of a run that was killed while it wrote this step.
                checkpoint.remove_partial(self._aside(step))
                self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that was removed is not made again
                self._aside(step).mkdir()
                self._close_directory()
                self._directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                problem = error.strerror or str(error)  # without the path, which FAILED names already
        # All ranks have to know before any copies its tensors: `saved_tensors` is collective under ZeRO.
        problem = self.world.broadcast(problem, "the folder of the checkpoint")
        if problem is not None:
            self._under_way = Future()
            self._step = step
            self._under_way.set_exception(OSError(problem))
            if logs:
                log.error(FAILED, step, self.folder, problem)
        return problem is None

    def write(self, contents: Contents, logs: bool = True) -> None:
        """Write a checkpoint into the folder that `open` made; in the background, unless the configuration says
        otherwise.

        `logs`: log a failure; without, the caller waits for the write and reports it.
        """
        future: Future[Path] = Future()
        self._under_way = future
        self._step = contents.step

        def work() -> None:
            try:
                path = self._write(contents)
                self._close_directory()
                future.set_result(path)
            except BaseException as error:  # whatever it is, the run goes on without this checkpoint
                try:
                    with contextlib.suppress(OSError):  # else it would keep a full disk full
                        checkpoint.remove_partial(self._aside(contents.step))
                    self._remove_made_anew()
                    self._close_directory()
                    if logs:
                        log.error(FAILED, contents.step, self.folder, error)
                finally:  # after the line, so that the waiting thread reports last; also where nothing can be logged
                    future.set_exception(error)

        if self.config.background:
            # A daemon, since the run's end waits for it by name and with a deadline (`wait`).
            threading.Thread(target=work, name="rlvr-checkpoint", daemon=True).start()
        else:
            work()

    def wait(self) -> Exception | None:
        """Wait until nothing is being written; why the last write failed, where it did. WaitTimeoutError."""
        if self._under_way is None:
            return None
        what = f"the checkpoint of step {self._step} to be on disk"
        finished(self._under_way, what, time.monotonic() + WRITE_SECONDS)
        error = self._under_way.exception()
        # KeyboardInterrupt and SystemExit of the thread must not end the thread that asks for the outcome of the write.
        if error is None or isinstance(error, Exception):
            return error
        return RuntimeError(repr(error))

    @property
    def busy(self) -> bool:
        """Return True if a checkpoint is being written."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def state(self) -> str:
        """Return the outcome of the last write, in words."""
        if self._under_way is None:
            return "none written so far"
        if not self._under_way.done():
            return f"step {self._step} is being written"
        error = self._under_way.exception()
        return f"step {self._step} {'is on disk' if error is None else f'could not be written: {error}'}"

    # in the thread

    def _aside(self, step: int) -> Path:
        return self.folder / f".step-{step}.partial"

    def _close_directory(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _is_gone(self) -> bool:
        """Return True if the folder of checkpoints is no longer the one that the write was begun in."""
        if self._directory is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._directory), self.folder.stat())
        except FileNotFoundError:
            return True

    def _remove_made_anew(self) -> None:
        """Remove the empty folders that transformers made, with their parents, to save files in a folder that was
        gone."""
        if self._is_gone():
            with contextlib.suppress(OSError):  # not there, or not empty
                self.folder.rmdir()
                self.folder.parent.rmdir()

    def _write(self, contents: Contents) -> Path:
        aside = self._aside(contents.step)
        target = self.folder / f"step-{contents.step}"
        name = f"tensors-{self.world.rank}.safetensors"
        if not self.world.is_main:
            self._write_share(aside, name, contents.tensors)
            return target
        # Logs first: a run resumed from here reads them, and a machine that stops must not keep the checkpoint and lose
        # the logs.
        for path in contents.logs:
            if path.exists():
                _sync(path)
        save_file(dict(contents.tensors), aside / name)
        contents.models(aside)
        if self._is_gone():  # what was written before is not in the folder that is there now
            raise CheckpointError(f"{self.folder} was removed or renamed meanwhile")
        (aside / STATE).write_text(json.dumps(contents.state), encoding="utf-8")
        # After rank 0's own files, so that all ranks write at the same time.
        notes = self._notes(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file() and path.name not in notes)
        for path in files:
            _sync(path)
        # Read back by rank 0 from the shared storage, also what other ranks wrote: the note holds the sum of what they
        # meant to write.
        sums = {str(path.relative_to(aside)): checksum_of(path) for path in files}
        for rank, note in enumerate(notes, start=1):
            if sums.get(f"tensors-{rank}.safetensors") != (aside / note).read_text():
                raise CheckpointError(f"what rank {rank} wrote is not what is on disk")
            (aside / note).unlink()
        frozen = dict(contents.frozen)
        manifest = Manifest(contents.step, self.world.size, contents.metrics, versions(), sums, models=frozen)
        # The manifest last: only a folder that has it counts as a checkpoint.
        (aside / MANIFEST).write_text(manifest.text(), encoding="utf-8")
        # A file's fsync does not cover its entry in the directory; directories are synced after the files in them.
        for path in [aside / MANIFEST, *(path for path in aside.rglob("*") if path.is_dir()), aside]:
            _sync(path)
        # A rename within a folder is atomic; the sync of the folder after it makes the rename itself last.
        checkpoint.replace(target, aside)
        _sync(self.folder)
        best = None
        if (keeps := self.config.best) and (scored := checkpoint.best(self.folder, keeps.metric, keeps.mode)):
            best = scored[0]
        # Only now: until here the checkpoints before are the ones to resume from.
        checkpoint.remove_old(self.folder, target, self.config.keep, best, self.config.every)
        return target

    def _write_share(self, aside: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors of a rank other than 0, and its note that they are there."""
        save_file(dict(tensors), aside / name)
        _sync(aside / name)
        note = aside / f"{name}.note"
        # Written aside and renamed, or rank 0 could read half of it.
        note.with_suffix(".tmp").write_text(checksum_of(aside / name))
        os.replace(note.with_suffix(".tmp"), note)

    def _notes(self, aside: Path) -> list[str]:
        """The notes of ranks 1 and up, once all are there. CheckpointError names ranks that do not write, TrainingError
        one that is gone; one that only failed still writes what it has copied. A large share may take longer, while it
        grows."""
        notes = {rank: f"tensors-{rank}.safetensors.note" for rank in range(1, self.world.size)}
        missing = set(notes)
        deadline = time.monotonic() + WRITE_SECONDS / 2
        watch = BarrierWait(self.world, missing)
        before: dict[int, int] = {}
        while True:
            missing -= {rank for rank in missing if (aside / notes[rank]).exists()}
            sizes = {rank: _size(aside / f"tensors-{rank}.safetensors") for rank in missing}
            # Progress, not time, decides: the deadline moves while any missing file grows. No `Wait` and no `Deadline`,
            # which end at a time that is known before.
            if sizes != before:
                before = sizes
                deadline = time.monotonic() + WRITE_SECONDS / 2
            if not missing:
                return list(notes.values())
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {rank}" for rank in sorted(missing))
                raise CheckpointError(
                    f"{who} wrote nothing: run.dir must be on storage that all ranks share (their own output says more)"
                )
            # Raises for a rank that is gone (docs/log.md: two of 33 runs with a killed rank waited here for 30
            # minutes).
            watch.look("its part of the checkpoint", failures=False)
            # Arbitrary: one look at a folder of network storage, 20 times a second.
            time.sleep(0.05)


def versions() -> dict[str, str]:
    """Of what decides the bits of a run: packages, Python, and the number of threads."""
    return {**installed(PACKAGES), "threads": str(torch.get_num_threads())}


def _size(path: Path) -> int:
    """A file's size in bytes, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def _sync(path: Path) -> None:
    # Read-only suffices for fsync on Linux, and is the only way to open a directory.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
