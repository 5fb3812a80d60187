"""What of a run is saved, when, and how a run goes on from it.

Everything that decides the future is in a checkpoint (N8): weights, optimizer and reference as tensors; the place in the
stages, versions, draws, pools, controllers, advantages' memories, per-prompt history and what is owed as JSON. Random
numbers need no state: seeds follow from paths (see `seeding`). Rollouts that were sampled ahead are not saved but their
draws are, and they are sampled again from the same seeds.

Invariants: a checkpoint is taken between steps only; nothing on disk is touched before everything in a checkpoint was found
to fit; a step waits for the copy to host memory and for the write before, not for its own.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlvr.core.specs import ComponentSpec
from rlvr.data.samplers import fingerprint_of
from rlvr.distributed import checkpoint
from rlvr.distributed.checkpoint import Saved, Seal
from rlvr.distributed.checkpoint_writer import Contents, HostCopies, Writer, versions
from rlvr.distributed.models import Files, merged_files, model_files
from rlvr.distributed.shares import load_reference, saved_reference
from rlvr.errors import CheckpointError, ConfigError, TrainingError
from rlvr.monitor.metrics import record
from rlvr.planner import STATE, automatic_keys, plan_resumed, put_values
from rlvr.policy.adapters import is_adapter
from rlvr.policy.loading import set_checkpointing
from rlvr.rollout.weights import whole_size
from rlvr.run.dry_run import recorded_bytes, size_text

if TYPE_CHECKING:
    from rlvr.trainer import GRPOTrainer

log = logging.getLogger(__name__)

MOST = 0.03
"""The share of the time since the start that checkpoints may have held the steps up after one by the clock."""


class Saver:
    """Saves and loads the state of a trainer's run. With several ranks every method is called on all of them."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.config = trainer.config.checkpoint
        self.writer = Writer(trainer.folder.checkpoints, self.config, trainer.world)
        self._copies = HostCopies()
        self._fingerprints: list[str] | None = None
        self.first_step: int | None = None
        """The first step of this process, where it went on from a checkpoint."""
        self._kept_rollouts = 0
        """Bytes of recorded rollouts that stay whatever logging.rollouts_gb says."""
        self._due = 0.0
        """When the next checkpoint by the clock is due, in time.monotonic seconds."""
        self._began, self._held = 0.0, 0.0
        """When this process began to train, and the seconds that checkpoints have held its steps up since."""
        self._best_under_way: float | None = None
        """The value of the metric of `checkpoint.best` in the checkpoint that was begun last."""

    # beginning and ending

    def begin(self, resume: str | None) -> Path | None:
        """Take the run folder, fresh or from the checkpoint that `resume` means, which is returned. ConfigError where the folder
        cannot be made, written to or moved."""
        try:
            return self._begin(resume)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(
                f"the run folder {self.trainer.folder.path} cannot be used: {error.strerror}"
                f"{'' if error.filename is None else f' ({error.filename})'}. Choose another run.dir or run.name"
            ) from error

    def _begin(self, resume: str | None) -> Path | None:
        folder, world = self.trainer.folder, self.trainer.world
        found = None
        if world.leads:
            folder.refuse_foreign()
            if folder.path.exists():  # else a refusal leaves nothing behind
                folder.lock()
            found = folder.find(resume) if resume else None
            folder.lock()
        found = world.broadcast(found, "the checkpoint to go on from")
        if found is not None:
            self._take(checkpoint.read(found), keep_cut=resume != "auto")
        elif world.leads and (moved := folder.begin(resume == "auto")) is not None:
            count = len(list(moved.parent.glob(f"{folder.path.resolve().name}.old-*")))
            say = f"the run that {folder.path} held is now {moved}"
            self.trainer.reporting.console.message(
                say if count == 1 else f"{say} ({count} such folders; remove those not needed)"
            )
        if world.leads:
            folder.open_log(self.trainer.reporting.console)
            self._check_space()
        self._began = time.monotonic()
        self._schedule(0.0)
        return found

    def _check_space(self) -> None:
        """ConfigError where there is less space than the checkpoints and rollouts that the run keeps take."""
        trainer, folder = self.trainer, self.trainer.folder.path
        one = self.size()
        count = self._kept() + 1  # and the one that is being written
        rollouts = recorded_bytes(trainer.config, trainer.resolved.plans)[1]
        files = (file for name in ("checkpoints", "rollouts") for file in (folder / name).rglob("*"))
        there = sum(file.stat().st_size for file in files if file.is_file()) - self._kept_rollouts
        free = shutil.disk_usage(folder).free
        finished = trainer.state.step >= sum(plan.allowed for plan in trainer.resolved.plans)
        if not finished and free + there < count * one + rollouts:
            raise ConfigError(
                f"{folder} has {size_text(free)} of free space, and the run takes up to {size_text(count * one + rollouts)}: "
                f"{count} checkpoints of about {size_text(one)} (checkpoint.keep, and one that is being written) and "
                f"{size_text(rollouts)} of rollouts (logging.rollouts_gb). Free some space, lower these, or set run.dir to a "
                "place that has more"
            )

    def _kept(self) -> int:
        """The number of checkpoints that are kept at most, as far as it can be known before."""
        config, steps = self.config, sum(plan.allowed for plan in self.trainer.resolved.plans)
        best = int(config.best is not None)
        if config.every == 0:
            return min(config.keep, 2, max(1, steps)) + best  # how many more there will be, only the clock can tell
        between = checkpoint.kept_between(config.keep) if config.minutes else 1
        return min(config.keep, steps // config.every) + between + best

    def size(self) -> int:
        """About how many bytes a checkpoint takes."""
        trainer = self.trainer
        trained = trainer.policy.trainable().values()
        weights = sum(whole_size(p) * p.element_size() for p in trained)
        optimizer = trainer.config.optim.optimizer.name
        state = sum(whole_size(p) for p in trained) * STATE.get(optimizer, STATE["adamw"])
        reference = weights if any(stage.keeps_reference for stage in trainer.stages) else 0
        whole = sum(whole_size(p) * p.element_size() for p in trainer.policy.model.parameters())
        adapter = is_adapter(trainer.policy.model)
        model = (weights + (whole if self.config.merged else 0)) if adapter else whole
        return int(weights + state + reference + model)

    def close(self) -> None:
        """Wait for what is being written, unless the run was told to stop at once, and leave the run folder to others."""
        if not self.trainer.stop.at_once:
            self.writer.wait()
        self.trainer.folder.close()

    # saving

    def after_step(self, last: bool) -> None:
        """Save where a checkpoint is due, or where the step is the best so far by the metric that the run keeps the best of.

        The failure of a `last` step's is not logged: `leave` saves it once more, and raises where that fails too.
        """
        every, step = self.config.every, self.trainer.state.step
        due = every > 0 and step % every == 0
        if self.config.best is not None or self.config.minutes > 0:  # rank 0 decides for all
            due = self.trainer.world.broadcast(due or self._is_due() or self._is_best(), "whether to save")
        if due:
            self.save(wait=False, logs=not last)

    def _is_due(self) -> bool:
        """Tell whether it is time for a checkpoint by the clock; never while the one before is being written."""
        by_clock = self.config.minutes > 0 and not self.writer.busy
        return by_clock and time.monotonic() >= self._due

    def _schedule(self, seconds: float) -> None:
        """Set when the next checkpoint by the clock is due, after one that held the steps up for `seconds`: so late that
        another one that costs as much keeps within the share. What the first one costs, nobody knows before."""
        self._held += seconds
        self._due = max(time.monotonic() + 60 * self.config.minutes, self._began + (self._held + seconds) / MOST)

    def after_evaluation(self) -> None:
        """The evaluation of a step, which was saved before it, has been made: save the step again where it is the best."""
        if self.config.best is not None and self.trainer.world.broadcast(self._is_best(), "whether to save"):
            self.save(wait=False)

    def _is_best(self) -> bool:
        keeps, trainer = self.config.best, self.trainer
        if keeps is None or not trainer.world.leads or not trainer.state.metrics:
            return False
        value = trainer.state.metrics[-1].get(keeps.metric)
        if value is None:
            return False
        begun = self._best_under_way if self.writer.busy else None  # no step waits for the write; asked before the disk
        found = checkpoint.best(trainer.folder.checkpoints, keeps.metric, keeps.mode)
        known = [score for score in (begun, found and found[1]) if score is not None]
        return all(value > score if keeps.mode == "max" else value < score for score in known)

    def leave(self, failed: bool = False) -> None:
        """After the last step of a call of `train`: a checkpoint of it, on disk. TrainingError where it cannot be written.

        `failed`: this rank had to stop; others may be elsewhere, so that with several the last checkpoint has to do.
        """
        trainer = self.trainer
        trainer.reporting.rollout_log.flush()
        if failed and trainer.world.size > 1:
            return
        saved = self.writer.wait() is None and (self._path.exists() or not trainer.state.step)
        if not trainer.world.broadcast(saved, "whether the last step is saved"):
            self.save()

    def advice(self) -> str:
        """Say, in a sentence, how to go on after an error: which steps are saved."""
        folder = self.trainer.folder.checkpoints
        steps = [checkpoint.step_of(path) for path in checkpoint.checkpoints(folder) if checkpoint.is_sealed(path)]
        if steps:
            return f"Steps 1 to {max(steps)} are saved: correct it and go on with --resume auto"
        done = "No step was saved" if self.trainer.state.step else "Nothing was trained"
        return f"{done}: correct it and start again"

    @property
    def _path(self) -> Path:
        return self.trainer.folder.checkpoints / f"step-{self.trainer.state.step}"

    def save(self, wait: bool = True, logs: bool = True) -> Path:
        """Save the run as it is after the last whole step; its path.

        With `wait` it is there on return, or a TrainingError says why not. Without, a failure costs nothing, and with `logs` it
        is logged.
        """
        trainer, problem = self.trainer, None
        trainer.folder.check_held()
        began = time.monotonic()
        trainer.reporting.rollout_log.flush()
        logs = logs and not wait  # an error that is raised is reported by whoever catches it
        if self.writer.open(trainer.state.step, logs):
            if self.config.best is not None and trainer.state.metrics:
                self._best_under_way = trainer.state.metrics[-1].get(self.config.best.metric)
            self.writer.write(self._contents(), logs)
        if wait:
            problem = self.writer.wait()
        self._schedule(time.monotonic() - began)
        if problem is not None:
            last = next(reversed(checkpoint.checkpoints(trainer.folder.checkpoints)), None)
            raise TrainingError(
                f"the checkpoint of step {trainer.state.step} could not be written to {trainer.folder.checkpoints}: {problem}. The last one "
                f"is {last or 'none'}"
            ) from problem
        return self._path

    def _contents(self) -> Contents:
        """A copy of the run's state."""
        trainer, leads = self.trainer, self.trainer.world.leads
        live = trainer.training.backend.saved_tensors()
        tensors = live if trainer.training.backend.saves_copies else self._copies(live)
        copied = {tensor.data_ptr(): tensors[name] for name, tensor in live.items()}
        models = [("model", model_files(trainer.policy, leads, copied))]
        if self.config.merged and is_adapter(trainer.policy.model):
            models.append(("merged", merged_files(trainer.policy, leads)))
        if (reference := trainer.training.learner.reference) is not None:
            tensors = {**tensors, **saved_reference(reference, trainer.world)}
        if not leads:
            return Contents(trainer.state.step, tensors)
        return Contents(
            trainer.state.step,
            tensors,
            state=self._state(),
            metrics=trainer.state.metrics[-1] if trainer.state.metrics else {},
            models=_all(models),
            logs=[trainer.folder.metrics.path, trainer.folder.evaluations.path],
        )

    def _state(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            **trainer.state.state_dict(),
            "stages": [stage.state_dict() for stage in trainer.stages],
            "history": trainer.rollouts.history.state_dict(),
            "evaluated_on": self._evaluated_on(),
            "rollouts_kept": trainer.reporting.rollout_log.kept_until,
            "config": trainer.config.dump(),
            "recorded": trainer.folder.given.tree,
        }

    def _evaluated_on(self) -> list[str]:
        """Fingerprints of the stages' evaluation tasks."""
        if self._fingerprints is None:
            tasks = [self.trainer.tasks.evaluation(plan.config) for plan in self.trainer.resolved.plans]
            self._fingerprints = [fingerprint_of(of_stage) for of_stage in tasks]
        return self._fingerprints

    # loading

    def load(self, path: Path) -> None:
        """Take back the state of a checkpoint. CheckpointError names what does not fit."""
        self._take(checkpoint.load(path), keep_cut=True)

    def _take(self, saved: Saved, keep_cut: bool) -> None:
        trainer, state = self.trainer, saved.state
        self._check_engine(state["config"]["rollout"]["engine"])
        self._plan_memory(state["config"])
        free = automatic_keys(trainer.resolved.memory_plan.written)
        trainer.folder.check(state["config"], state.get("recorded", state["config"]), free)
        self._check_data(state)
        for line in differing(saved.seal, trainer.world.size):
            log.warning("%s: %s", saved.path, line)
        trainer.rollouts.engine.release()  # the weights change, and their version with them
        self._restore(state)
        trainer.training.backend.load_tensors(saved.tensors)
        if trainer.training.learner.reference is not None:
            load_reference(trainer.training.learner.reference, saved.tensors)
        rows: tuple[list[Any], list[Any]] = ([], [])
        if trainer.world.leads:
            here = saved.path.resolve().parent == trainer.folder.checkpoints.resolve()
            made = [row for row in trainer.folder.evaluations.rows() if row["step"] == state["step"]]
            trainer.state.evaluation_pending = state["owes_evaluation"] and here and not made
            cut = trainer.folder.cut(state["step"], trainer.state.evaluation_pending, keep_cut)
            if cut is not None:
                trainer.reporting.console.message(f"what came after step {state['step']} is now in {cut}")
            if here:
                self._complete_lines(saved.seal.metrics, made[-1] if made else {})
                self._keep_rollouts(state)
            rows = list(trainer.folder.metrics.rows()), list(trainer.folder.evaluations.rows())
            if here and len(rows[0]) < state["logged"]:
                lost = state["logged"] - len(rows[0])
                log.warning("%s lacks %d of the steps before the checkpoint", trainer.folder.metrics.path, lost)
        trainer.state.metrics, trainer.state.evaluations, trainer.state.evaluation_pending = trainer.world.broadcast(
            (*rows, trainer.state.evaluation_pending), "the metrics so far"
        )

    def _check_engine(self, saved: Any) -> None:
        """CheckpointError where `rollout.engine: auto` took another engine than that of the checkpoint."""
        trainer = self.trainer
        if trainer.resolved.engine_reason is not None and ComponentSpec.parse(saved) != trainer.config.rollout.engine:
            raise CheckpointError(
                f"the checkpoint was made with rollout.engine {saved!r}, and here {trainer.resolved.engine_reason}. Set rollout.engine, or give "
                "`resume` to GRPOTrainer itself, which then takes the checkpoint's engine"
            )

    def _plan_memory(self, saved: dict[str, Any]) -> None:
        """Take the values that `auto` has in a checkpoint's configuration, where these fit here."""
        trainer = self.trainer
        plan = plan_resumed(trainer.resolved.memory_plan, trainer.world, saved)
        trainer.resolved.memory_plan = plan
        before = trainer.config.model.gradient_checkpointing
        put_values(plan.config, trainer.config, trainer.resolved.plans)
        if trainer.config.model.gradient_checkpointing != before:
            set_checkpointing(trainer.policy.model, trainer.config.model.gradient_checkpointing is True)
        if plan.notice is not None:
            trainer.reporting.console.message(plan.notice, "warning")

    def _keep_rollouts(self, state: dict[str, Any]) -> None:
        """Keep the rollouts that were recorded under a larger logging.rollouts_gb than now, or by a version without one."""
        trainer, limit = self.trainer, self.trainer.config.logging.rollouts_gb
        before = state["config"]["logging"].get("rollouts_gb")
        lowered = limit is not None and (before is None or limit < before)
        kept = trainer.reporting.rollout_log.keep_until(state["step"] if lowered else state.get("rollouts_kept", 0))
        self._kept_rollouts = kept
        if lowered and kept:
            trainer.reporting.console.message(
                f"the rollouts recorded so far ({size_text(kept)}) stay: logging.rollouts_gb={limit:g} is less than before, and "
                "holds for those of later steps"
            )

    def _complete_lines(self, last: dict[str, Any], evaluation: dict[str, Any]) -> None:
        """Write the line of the checkpoint's step, or its evaluation into it, where a kill came before that.

        `last` is the step's record as it was before its evaluation.
        """
        file = self.trainer.folder.metrics
        written = {row["step"]: row for row in file.rows()}
        if not last or max(written, default=0) < last["step"] - 1:
            return
        before = written.get(last["step"])
        results = {name: value for name, value in evaluation.items() if name not in ("step", "stage")}
        line = record({**(before or last), **results})
        if line != before:
            file.truncate_after(last["step"] - 1)
            file.append(line)

    def _check_data(self, state: dict[str, Any]) -> None:
        """CheckpointError where the evaluation tasks are others, and that was not accepted. (Stages see to their own tasks.)"""
        if self.config.accept_changed_data:
            return
        for plan, before, now in zip(
            self.trainer.resolved.plans, state["evaluated_on"], self._evaluated_on(), strict=True
        ):
            if before != now:
                raise CheckpointError(
                    f"the checkpoint was made with other evaluation tasks (stage {plan.name!r}: fingerprint {before}, now {now}): "
                    "its results would not be comparable. Put the data back, or set checkpoint.accept_changed_data=true"
                )

    def _restore(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        trainer.rollouts.history.load_state_dict(state["history"])
        for stage, saved in zip(trainer.stages, state["stages"], strict=True):
            stage.load_state_dict(saved)
        if trainer.state.stage_number != state["stage_number"]:
            trainer.enter(state["stage_number"])
        trainer.state.load_state_dict(state)
        self.first_step = trainer.state.step + 1


def differing(seal: Seal, ranks: int) -> Iterator[str]:
    """What differs between where a checkpoint was made and here, that may change the bits of what follows."""
    if seal.ranks != ranks:
        yield (
            f"it was made by {seal.ranks} ranks and goes on with {ranks}: the same data and the same steps, but sums over "
            "ranks round differently"
        )
    for name, now in versions().items():
        if (before := seal.versions.get(name, now)) != now:
            yield f"it was made with {name} {before} and goes on with {now}: results may differ in their last bits"


def _all(models: list[tuple[str, Files]]) -> Files:
    def write(folder: Path) -> None:
        for name, files in models:
            with torch.no_grad():
                files(folder / name)

    return write
