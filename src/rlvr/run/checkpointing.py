"""Checkpoints of a run: their contents, when they are saved, and how their state is restored.

Everything that decides the future is in a checkpoint (N8): weights, optimizer and reference as tensors; the place in
the stages, versions, draws, pools, controllers, advantages' memories, per-prompt history and requeued draws as JSON.
Random numbers need no state: seeds follow from paths (see `rlvr.core.seeding`). Rollouts that were sampled ahead are
not saved but their draws are, and they are sampled again from the same seeds.

Invariants: a checkpoint is taken between steps only; a step waits for the copy to host memory and for the write before,
not for its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rlvr.config import CheckpointConfig
from rlvr.distributed import World, checkpoint
from rlvr.distributed.checkpoint_writer import Contents, HostCopies, Writer
from rlvr.distributed.models import Files, merged_files, model_files
from rlvr.distributed.shares import load_reference, saved_reference
from rlvr.errors import TrainingError
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.resolved_config import RunIdentity
from rlvr.run.run_folder import RunFolder
from rlvr.run.train_state import TrainState

# A choice, not a measurement. Where each checkpoint holds the steps up for c seconds, they come about c / MOST apart
# (33 s for each second); a larger value saves more often.
MOST = 0.03
"""The share of the time since the start that checkpoints may have held the steps up after one by the clock."""


class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> Any:
        """The state, as JSON types."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Take back what `state_dict` gave. CheckpointError where it does not fit."""
        ...


@dataclass
class Checkpointer:
    """Saves and restores the state of a run. With several ranks every method is called on all of them.

    `stateful` has the objects to save under their keys in a checkpoint's state; the counters (`state`), the tensors
    (`training`) and the facts that a checkpoint has to fit (`identity`) are saved beside them.
    """

    config: CheckpointConfig
    folder: RunFolder
    world: World
    state: TrainState
    training: PolicyTraining
    stateful: Mapping[str, Stateful]
    identity: RunIdentity
    rollout_log: RolloutLog
    _copies: HostCopies = field(default_factory=HostCopies)
    _due: float = 0.0
    """When the next checkpoint by the clock is due, in time.monotonic seconds."""
    _began: float = 0.0
    """When this process began to train, in time.monotonic seconds."""
    _held: float = 0.0
    """Seconds that checkpoints have held the steps of this process up."""
    _best_under_way: float | None = None
    """The value of the metric of `checkpoint.best` in the checkpoint that was begun last."""

    _begun: list[Path] = field(default_factory=list)
    """Checkpoints that were begun and not yet returned by `written`."""

    def __post_init__(self) -> None:
        self.writer = Writer(self.folder.checkpoints, self.config, self.world)

    # when

    def start_clock(self) -> None:
        """Count from now on when checkpoints by the clock are due."""
        self._began = time.monotonic()
        self._schedule(0.0)

    def after_step(self, last: bool) -> None:
        """Save where a checkpoint is due, or where the step is the best so far by the metric that the run keeps the
        best of.

        The failure of a `last` step's is not logged: `leave` saves it once more, and raises where that fails too.
        """
        every = self.config.every
        step = self.state.step
        due = every > 0 and step % every == 0
        if self.config.best is not None or self.config.minutes > 0:  # rank 0 decides for all
            due = self.world.broadcast(due or self._is_due() or self._is_best(), "whether to save")
        if due:
            self.save(wait=False, logs=not last)

    def after_evaluation(self) -> None:
        """The evaluation of a step, which was saved before it, has been made: save the step again where it is the
        best."""
        if self.config.best is not None and self.world.broadcast(self._is_best(), "whether to save"):
            self.save(wait=False)

    def leave(self, failed: bool = False) -> None:
        """After the last step of a call of `train`: a checkpoint of it, on disk. TrainingError where it cannot be
        written.

        `failed`: this rank stops with an error. With several ranks nothing is saved then, since the others are not at
        this place; the run goes on from the checkpoint before.
        """
        # A write of rollouts that failed in its thread raises here, before the run is called finished.
        self.rollout_log.flush()
        # `save` broadcasts. A rank that failed gets here alone, and the others wait for it at another exchange.
        if failed and self.world.size > 1:
            return
        # The write may have failed, and the last step may never have been due. A run of no step has nothing to save.
        saved = self.writer.wait() is None and (self._path.exists() or not self.state.step)
        # `save` is collective: all ranks take the same branch, that of rank 0.
        if not self.world.broadcast(saved, "whether the last step is saved"):
            self.save()

    def _is_due(self) -> bool:
        """Return True if it is time for a checkpoint by the clock; never while the one before is being written."""
        by_clock = self.config.minutes > 0 and not self.writer.busy
        return by_clock and time.monotonic() >= self._due

    def _schedule(self, seconds: float) -> None:
        """Set when the next checkpoint by the clock is due, after one that held the steps up for `seconds`: so late
        that another one that costs as much keeps within the share. What the first one costs, nobody knows before."""
        self._held += seconds
        # With b = `_began`, h = `_held` and c = `seconds`, the cost of the last one, the next one is due at the first
        # time t at which (h + c) / (t - b) <= MOST, so at t = b + (h + c) / MOST, and not before `minutes` have passed.
        self._due = max(time.monotonic() + 60 * self.config.minutes, self._began + (self._held + seconds) / MOST)

    def _is_best(self) -> bool:
        keeps = self.config.best
        if keeps is None or not self.world.is_main or not self.state.metrics:
            return False
        value = self.state.metrics[-1].get(keeps.metric)
        if value is None:
            return False
        # The checkpoint that is being written is not in the folder yet. Without its value a worse step that follows
        # would count as the best, too.
        begun = self._best_under_way if self.writer.busy else None  # no step waits for the write; asked before the disk
        best = checkpoint.best(self.folder.checkpoints, keeps.metric, keeps.mode)
        scores = [score for score in (begun, best and best[1]) if score is not None]
        return all(value > score if keeps.mode == "max" else value < score for score in scores)

    # saving

    @property
    def _path(self) -> Path:
        return self.folder.checkpoints / f"step-{self.state.step}"

    def save(self, wait: bool = True, logs: bool = True) -> Path:
        """Save the run as it is after the last whole step; its path.

        With `wait` it is there on return, or a TrainingError says why not. Without, a failure costs nothing, and with
        `logs` it is logged.
        """
        problem = None
        # First of all: another trainer may have taken the folder, or somebody may have removed it.
        self.folder.check_held()
        # From here to `_schedule` the step waits: for the write before, for the copy to host memory and, with `wait`,
        # for the disk.
        began = time.monotonic()
        self.rollout_log.flush()
        logs = logs and not wait  # an error that is raised is reported by whoever catches it
        if self.writer.open(self.state.step, logs):
            if self.config.best is not None and self.state.metrics:
                self._best_under_way = self.state.metrics[-1].get(self.config.best.metric)
            self.writer.write(self._contents(), logs)
            self._begun.append(self._path)
        if wait:
            problem = self.writer.wait()
        # After a failure too: else a full disk would be tried again after each step.
        self._schedule(time.monotonic() - began)
        if problem is not None:
            last = next(reversed(checkpoint.checkpoints(self.folder.checkpoints)), None)
            raise TrainingError(
                f"the checkpoint of step {self.state.step} could not be written to {self.folder.checkpoints}: "
                f"{problem}. The last one is {last or 'none'}"
            ) from problem
        return self._path

    def written(self) -> list[Path]:
        """Checkpoints that are whole on the disk now, each returned once; none while one is being written."""
        if self.writer.busy:
            return []
        begun = dict.fromkeys(self._begun)
        self._begun.clear()
        # One that failed, or that gave way to newer ones meanwhile, is not there.
        return [path for path in begun if checkpoint.is_sealed(path)]

    def advice(self) -> str:
        """Say, in a sentence, how to go on after an error: which steps are saved."""
        saved = checkpoint.checkpoints(self.folder.checkpoints)
        steps = [checkpoint.step_of(path) for path in saved if checkpoint.is_sealed(path)]
        if steps:
            return f"Steps 1 to {max(steps)} are saved: correct it and go on with --resume auto"
        done = "Nothing was trained"
        if self.state.step:
            done = "No step was saved"
        return f"{done}: correct it and start again"

    def close(self, wait: bool) -> None:
        """Leave the run folder to others; `wait`: first for what is being written."""
        if wait:
            self.writer.wait()
        self.folder.close()

    def _contents(self) -> Contents:
        """A copy of the run's state."""
        policy = self.training.policy
        backend = self.training.backend
        # The thread writes the copies while the next step changes the weights in place. DeepSpeed's backend gathers its
        # shards into new tensors (`saves_copies`); to copy those again would only take memory.
        live = backend.saved_tensors()
        tensors = live if backend.saves_copies else self._copies(live)
        # `model/` has the same weights under other names. It is written from these copies, which are found by the
        # address of the live tensor, so that both files are of one version and no weight is copied twice.
        copied = {tensor.data_ptr(): tensors[name] for name, tensor in live.items()}
        models = [("model", model_files(policy, self.world.is_main, copied))]
        if self.config.merged and policy.has_adapter:
            models.append(("merged", merged_files(policy, self.world.is_main)))
        if (reference := self.training.learner.reference) is not None:
            tensors = {**tensors, **saved_reference(reference, self.world)}
        # Each rank writes its own tensors. State, metrics, models and logs are written once, by rank 0.
        if not self.world.is_main:
            return Contents(self.state.step, tensors)
        return Contents(
            self.state.step,
            tensors,
            state=self._state(),
            metrics=self.state.metrics[-1] if self.state.metrics else {},
            models=_all(models),
            frozen=self.identity.models(),
            # Synced before the manifest: a resume expects the lines of all steps up to the checkpoint's, and
            # `MetricsFile` leaves them in the page cache, which a power cut loses.
            logs=[self.folder.metrics.path, self.folder.evaluations.path],
        )

    def _state(self) -> dict[str, Any]:
        return {
            **self.state.state_dict(),
            **{key: one.state_dict() for key, one in self.stateful.items()},
            "rollouts_kept": self.rollout_log.kept_until,
            **self.identity.state_dict(),
        }

    # restoring

    def restore_objects(self, state: Mapping[str, Any]) -> None:
        """Give the stateful objects what a checkpoint's state has of them."""
        for key, one in self.stateful.items():
            # Checkpoints of version 0.1.0 have no callbacks.
            if key in state or key != "callbacks":
                one.load_state_dict(state[key])

    def restore_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load weights, optimizer and reference of the current stage."""
        # The backend of the stage that trains: `Resumer` enters that stage first, which opens it.
        self.training.backend.load_tensors(tensors)
        if self.training.learner.reference is not None:
            load_reference(self.training.learner.reference, tensors)


def _all(models: list[tuple[str, Files]]) -> Files:
    def write(folder: Path) -> None:
        for name, files in models:
            # Merging an adapter computes with the parameters. The switch is per thread, and on in a new one, such as
            # the writer's.
            with torch.no_grad():
                files(folder / name)

    return write
