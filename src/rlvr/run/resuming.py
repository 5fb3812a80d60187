"""Beginning a run in its folder, fresh or from a checkpoint, where the disk has the space that the run needs.

Invariant: nothing on disk is touched before everything in a checkpoint was found to fit.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.config import CheckpointConfig, Config
from rlvr.distributed import World, checkpoint
from rlvr.distributed.checkpoint import Manifest, Saved
from rlvr.distributed.checkpoint_writer import versions
from rlvr.distributed.models import write_base
from rlvr.errors import ConfigError
from rlvr.monitor.metrics import record
from rlvr.planner import STATE
from rlvr.policy import Policy
from rlvr.rollout.weights import whole_size
from rlvr.run.checkpointing import Checkpointer
from rlvr.run.dry_run import recorded_bytes, size_text
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.reporting import Reporting
from rlvr.run.resolved_config import ResolvedConfig, RunIdentity
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_folder import RunFolder
from rlvr.run.stage_list import StageList
from rlvr.run.train_state import TrainState

log = logging.getLogger(__name__)


@dataclass
class Resumer:
    """Takes the run folder and, to resume, the state of a checkpoint. With several ranks every method is called on all
    of them."""

    resolved: ResolvedConfig
    identity: RunIdentity
    state: TrainState
    stages: StageList
    world: World
    folder: RunFolder
    training: PolicyTraining
    rollouts: RolloutRuntime
    reporting: Reporting
    checkpointer: Checkpointer
    _kept_rollouts: int = 0
    """Bytes of recorded rollouts that stay whatever logging.rollouts_gb says."""

    def begin(self, resume: str | None) -> None:
        """Take the run folder, fresh or from the checkpoint that `resume` means (None: as the trainer was made), and
        begin to report; once. ConfigError where the folder cannot be made, written to or moved, and for a run that has
        begun and is to go on from another place."""
        if self.folder.begun:
            if resume not in (None, "auto"):
                raise ConfigError(
                    f"GRPOTrainer.train: resume is {resume!r}, and this trainer has begun its run: make a new trainer"
                )
            return
        resume = self.resolved.resume if resume is None else resume
        with self.folder.chosen():
            checkpoint_path = self._begin(resume)
        # From here on: loading the model and reading a checkpoint are not counted as training.
        self.checkpointer.start_clock()
        self.folder.begun = True
        policy = self.training.policy
        # An adapter names the base that it belongs to. One that was built from random weights exists nowhere else.
        if policy.has_adapter and self.resolved.config.model.scratch is not None:
            write_base(policy, self.folder.path / "base", self.world.is_main)
        longest = [stage.longest_response for stage in self.stages]
        self.reporting.start(self.resolved.config, self.resolved.lines(longest))
        if checkpoint_path is not None:
            self.reporting.console.message(f"resumed from {checkpoint_path}: step {self.state.step}")

    def load(self, path: Path) -> None:
        """Take back the state of a checkpoint. CheckpointError names what does not fit."""
        self._take(checkpoint.load(path), keep_cut=True)

    def _begin(self, resume: str | None) -> Path | None:
        folder = self.folder
        checkpoint_path = None
        if self.world.is_main:
            folder.refuse_foreign()
            # `lock` makes the folder. A new one is made after `find` below, which may refuse the checkpoint.
            if folder.path.exists():  # else a refusal leaves nothing behind
                folder.lock()
            # Under the lock: the run that holds it might be removing the checkpoint that is found.
            checkpoint_path = folder.find(resume) if resume else None
            folder.lock()
        # Rank 0 alone looks and compares checksums: others might see a shared disk at another moment.
        checkpoint_path = self.world.broadcast(checkpoint_path, "the checkpoint to go on from")
        if checkpoint_path is not None:
            # `auto` takes the newest checkpoint, so what lies past it is what a kill left and is done again. A
            # checkpoint that is named may be an old one, whose later steps the user may want.
            self._take(checkpoint.read(checkpoint_path), keep_cut=resume != "auto")
        elif self.world.is_main and (moved := folder.begin(resume == "auto")) is not None:
            self._report_moved(moved)
        if self.world.is_main:
            folder.open_log(self.reporting.console)
            # A finished run needs no space, and its folder stays as it is.
            if self.state.step < self.resolved.steps:
                # After the folder is cut, which frees space.
                self._check_space()
                folder.write_environment()
        return checkpoint_path

    def _report_moved(self, moved: Path) -> None:
        count = len(list(moved.parent.glob(f"{self.folder.path.resolve().name}.old-*")))
        text = f"the run that {self.folder.path} held is now {moved}"
        if count > 1:
            text += f" ({count} such folders; remove those not needed)"
        self.reporting.console.message(text)

    def _check_space(self) -> None:
        """ConfigError where there is less space than the run needs."""
        keeps_reference = any(stage.keeps_reference for stage in self.stages)
        size = checkpoint_bytes(self.resolved.config, self.training.policy, keeps_reference)
        check_space(self.folder.path, self.resolved, size, self._kept_rollouts)

    def _take(self, saved: Saved, keep_cut: bool) -> None:
        """Restore a checkpoint, and cut the run folder to it; `keep_cut`: what is cut is kept, in a folder of its
        own."""
        state = saved.state
        # This may refuse the checkpoint, and so may `restore_objects` below, for other tasks. Both come before the
        # folder is cut.
        self.identity.check(state, self.world, self.training.policy, self.reporting.console.message)
        self.identity.check_models(saved.manifest.models, self.world)
        for line in version_differences(saved.manifest, self.world.size):
            log.warning("%s: %s", saved.path, line)
        self.rollouts.engine.release()  # the weights change, and their version with them
        # The order matters: the stages take back their draws; then the stage that trains is entered, which opens its
        # backend and learner and makes a snapshot for the reference; then the tensors go into both.
        self.checkpointer.restore_objects(state)
        if self.state.stage_number != state["stage_number"]:
            self.training.enter(self.stages[state["stage_number"]])
        self.state.load_state_dict(state)
        self.checkpointer.restore_tensors(saved.tensors)
        # Only rank 0 reads and cuts the files; the others get the records, which `metrics` and the health monitors
        # give.
        rows: tuple[list[Any], list[Any]] = ([], [])
        if self.world.is_main:
            rows = self._records(saved, keep_cut)
        self.state.metrics, self.state.evaluations, self.state.evaluation_pending = self.world.broadcast(
            (*rows, self.state.evaluation_pending), "the metrics so far"
        )

    def _records(self, saved: Saved, keep_cut: bool) -> tuple[list[Any], list[Any]]:
        """Cut the run folder to a checkpoint, on rank 0; the records of the steps and evaluations up to it."""
        folder = self.folder
        state = saved.state
        # A checkpoint of another run: this folder begins anew, and the lines of the steps before are in the other one.
        here = saved.path.resolve().parent == folder.checkpoints.resolve()
        made = [row for row in folder.evaluations.rows() if row["step"] == state["step"]]
        # The checkpoint is written before the evaluation of its step, and says that it is pending. Where it was made
        # after all, its row is in evaluations.jsonl.
        self.state.evaluation_pending = state["owes_evaluation"] and here and not made
        if state["owes_evaluation"] and here and made:
            self.state.unseen_evaluation = made[-1]
        cut = folder.cut(state["step"], self.state.evaluation_pending, keep_cut)
        if cut is not None:
            self.reporting.console.message(f"what came after step {state['step']} is now in {cut}")
        if here:
            self._complete_lines(saved.manifest.metrics, made[-1] if made else {})
            self._keep_rollouts(state)
        steps = list(folder.metrics.rows())
        evaluations = list(folder.evaluations.rows())
        if here and len(steps) < state["logged"]:
            lost = state["logged"] - len(steps)
            log.warning("%s lacks %d of the steps before the checkpoint", folder.metrics.path, lost)
        return steps, evaluations

    def _complete_lines(self, last: dict[str, Any], evaluation: dict[str, Any]) -> None:
        """Write the line of the checkpoint's step, or its evaluation into it, where a kill came before that.

        `last` is the step's record as it was before its evaluation.
        """
        file = self.folder.metrics
        written = {row["step"]: row for row in file.rows()}
        # The lines before it are missing, too: the file was removed or edited, and one line alone would leave a hole.
        if not last or max(written, default=0) < last["step"] - 1:
            return
        before = written.get(last["step"])
        results = {name: value for name, value in evaluation.items() if name not in ("step", "stage")}
        # The line that was written may have the results of an earlier evaluation of the same step, which the newer ones
        # replace.
        line = record({**(before or last), **results})
        if line != before:
            file.truncate_after(last["step"] - 1)
            file.append(line)

    def _keep_rollouts(self, state: dict[str, Any]) -> None:
        """Keep the rollouts that were recorded under a larger logging.rollouts_gb than now, or by a version without
        one."""
        limit = self.resolved.config.logging.rollouts_gb
        before = state["config"]["logging"].get("rollouts_gb")
        # A lower limit would remove what was recorded under the higher one; the user asked for it for what comes.
        lowered = limit is not None and (before is None or limit < before)
        if lowered:
            kept_until = state["step"]
        else:
            # Checkpoints of earlier versions lack the key.
            kept_until = state.get("rollouts_kept", 0)
        kept = self.reporting.rollout_log.keep_until(kept_until)
        self._kept_rollouts = kept
        if lowered and kept:
            self.reporting.console.message(
                f"the rollouts recorded so far ({size_text(kept)}) stay: logging.rollouts_gb={limit:g} is less than "
                "before, and holds for those of later steps"
            )


def version_differences(manifest: Manifest, ranks: int) -> Iterator[str]:
    """Differences between where a checkpoint was made and here, that may change the bits of what follows."""
    if manifest.ranks != ranks:
        yield (
            f"it was made by {manifest.ranks} ranks and goes on with {ranks}: the same data and the same steps, but "
            "sums over ranks round differently"
        )
    for name, now in versions().items():
        if (before := manifest.versions.get(name, now)) != now:
            yield f"it was made with {name} {before} and goes on with {now}: results may differ in their last bits"


def check_space(folder: Path, resolved: ResolvedConfig, checkpoint_size: int, exempt: int) -> None:
    """ConfigError where there is less space than the checkpoints and rollouts that the run keeps take.

    `checkpoint_size`: bytes of one checkpoint; `exempt`: bytes of recorded rollouts in `folder` that stay beside these.
    """
    count = kept_checkpoints(resolved.config.checkpoint, resolved.steps) + 1  # and the one that is being written
    rollouts = recorded_bytes(resolved.config, resolved.plans)[1]
    needed = count * checkpoint_size + rollouts
    # A run that goes on has part of what it needs already: its old files are replaced by the new ones. `exempt` files
    # stay.
    files = (file for name in ("checkpoints", "rollouts") for file in (folder / name).rglob("*"))
    there = sum(file.stat().st_size for file in files if file.is_file()) - exempt
    free = shutil.disk_usage(folder).free
    if free + there < needed:
        raise ConfigError(
            f"{folder} has {size_text(free)} of free space, and the run takes up to {size_text(needed)}: {count} "
            f"checkpoints of about {size_text(checkpoint_size)} (checkpoint.keep, and one that is being written) and "
            f"{size_text(rollouts)} of rollouts (logging.rollouts_gb). Free some space, lower these, or set run.dir "
            "to a place that has more"
        )


def kept_checkpoints(config: CheckpointConfig, steps: int) -> int:
    """The number of checkpoints that a run of so many steps keeps at most, as far as it can be known before."""
    # The best checkpoint is kept beside the `keep` newest ones, of which it may not be one.
    best = int(config.best is not None)
    if config.every == 0:
        return min(config.keep, 2, max(1, steps)) + best  # how many more there will be, only the clock can tell
    # The end of a run is saved at a step that need not be a multiple of `every`.
    between = 1
    if config.minutes:
        # Checkpoints by the clock fall between the multiples of `every`.
        between = checkpoint.kept_between(config.keep)
    return min(config.keep, steps // config.every) + between + best


def checkpoint_bytes(config: Config, policy: Policy, keeps_reference: bool) -> int:
    """About how many bytes a checkpoint takes; `keeps_reference`: a stage keeps a copy of the weights to compare
    with."""
    trained = policy.trainable().values()
    weights = sum(whole_size(p) * p.element_size() for p in trained)
    optimizer = config.optim.optimizer.name
    # STATE is in bytes for a weight: 8 for Adam's two float32 moments. An optimizer of the user's is taken for AdamW.
    state = sum(whole_size(p) for p in trained) * STATE.get(optimizer, STATE["adamw"])
    reference = weights if keeps_reference else 0
    model = sum(whole_size(p) * p.element_size() for p in policy.model.parameters())
    if policy.has_adapter:
        # `model/` then holds the adapter alone; `merged/` is the whole model.
        model = weights + (model if config.checkpoint.merged else 0)
    return int(weights + state + reference + model)
