"""GRPOTrainer: builds the parts of a run and goes round the loop.

    tasks -> groups of rollouts -> verdicts -> rewards -> advantages -> policy loss -> new weights -> (again)

The loop is `_go_through`. It knows no algorithm by name: a stage says what is collected, how it is scored and what is
optimised. Invariants: a step is whole or has not happened (the draws of an interrupted one are rolled back); one line
of metrics per step; the engine never samples with other weights than the version that it claims.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from rlvr.core.seeding import seed_of
from rlvr.core.startup_lines import StartupLines
from rlvr.core.waits import reporting as status_on_signal
from rlvr.data import TaskSource
from rlvr.distributed import World
from rlvr.distributed.step_meters import StepMeters
from rlvr.errors import UserCodeError, short_tracebacks
from rlvr.monitor.trackers import Tracker
from rlvr.records import Batch
from rlvr.rollout import CollectionInterruptedError, StepRollouts
from rlvr.run.callbacks import Callback, Callbacks
from rlvr.run.checkpointing import Checkpointer, Stateful
from rlvr.run.closing import show_closing
from rlvr.run.due_evaluations import DueEvaluations
from rlvr.run.evaluator import Evaluator
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.reporting import Reporting
from rlvr.run.resolved_config import RunIdentity, resolved_config
from rlvr.run.resuming import Resumer
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_folder import RunFolder
from rlvr.run.run_status import status
from rlvr.run.run_tasks import RunTasks, TaskSets
from rlvr.run.run_view import RunView
from rlvr.run.stage_list import StageList, open_stage
from rlvr.run.step_recorder import StepRecorder
from rlvr.run.stopping import RunStop, failing_together, stop_when_hopeless
from rlvr.run.train_state import TrainState
from rlvr.run.trainer_arguments import Rewards, TrainerSettings, WrittenConfig, check_steps, trainer_arguments
from rlvr.stages import Stage


@short_tracebacks("__init__", "train", "evaluate", "save", "load")
class GRPOTrainer(RunView):
    """Trains a policy on tasks with a verifier.

        trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", tasks, [correct, (fmt, 0.2)], learning_rate=1e-6)
        trainer.train()

    None stands for what `config` says, a Config, a mapping or a YAML file. A loaded `model` is moved to `model.device`;
    a str is a path or hub name. A `verifier` is one, a plain reward function, a registered name, or a list of these,
    alone or with weights, whose first one says what is right. `settings` are TRL's names of arguments and of common
    settings (`TrainerSettings`). `resume` is what `train` goes on from; given here, its engine is taken for `auto`.
    After `train()`: `metrics` (one record per step), `evaluations`, `batch` (the last one scored), `policy`. Raises
    RlvrError for bad input before any training.
    """

    def __init__(
        self,
        model: torch.nn.Module | str | Path | None = None,
        tasks: TaskSource | None = None,
        verifier: Rewards | None = None,
        config: WrittenConfig | None = None,
        *,
        eval_tasks: TaskSource | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trackers: Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
        resume: str | None = None,
        **settings: Unpack[TrainerSettings],
    ) -> None:
        own = {"model": model, "tasks": tasks, "verifier": verifier, "config": config}
        given = trainer_arguments({**own, "eval_tasks": eval_tasks, "tokenizer": tokenizer}, settings)
        self.world = world = World.from_environment(given.config.distributed.heartbeat_timeout)
        sets = TaskSets(given.tasks, given.eval_tasks)
        with StartupLines(given.config.logging.console):
            self.resolved = resolved = resolved_config(given, world, resume, sets)
            self.training = training = PolicyTraining(self.config, world, given.model, given.tokenizer)
            self.stop = RunStop(world, replies=world.is_main and self.config.logging.console != "off")
            self.rollouts = rollouts = RolloutRuntime(self.config, world, self.stop)
            self.meters = StepMeters(self.policy.home, world, rollouts.activity.idle)
            self.folder = folder = RunFolder(self.config)
            self.reporting = reporting = Reporting(
                self.config, folder, world.is_main, rollouts.activity.counts, trackers
            )
            self.tasks = RunTasks(sets, self.policy.tokenizer, world, reporting.console.message)
            self.state = state = TrainState()
            self.stages = StageList()
            self.evaluator = Evaluator(resolved.plans, state, training, rollouts, self.tasks, reporting)
            self.recorder = StepRecorder(state, training, rollouts, self.meters)
            identity = RunIdentity(resolved, self.tasks, folder, rollouts.model_records)
            self.callbacks = Callbacks(callbacks, self, self.stop, world.is_main)
            stateful: dict[str, Stateful] = {
                "history": rollouts.history,
                "stages": self.stages,
                "callbacks": self.callbacks,
            }
            self.checkpointer = Checkpointer(
                self.config.checkpoint, folder, world, state, training, stateful, identity, reporting.rollout_log
            )
            self.resumer = Resumer(
                resolved, identity, state, self.stages, world, folder, training, rollouts, reporting, self.checkpointer
            )
            self.due_evaluations = DueEvaluations(
                self.evaluate, state, self.tasks, reporting, self.checkpointer, world, self.callbacks
            )
            self.batch: Batch | None = None
            try:
                rollouts.open(resolved, training, self.tasks)
                for number in range(len(resolved.plans)):
                    self.stages.append(open_stage(number, resolved, training, rollouts, self.tasks, reporting))
                folder.given = sets.given_objects(self.config, given, resolved.plans, world.is_main)
                self.enter(0)
            except BaseException as error:  # Ctrl-C too: the engine and the threads are running by now
                world.fail(error)
                self.close()
                raise

    def train(self, steps: int | None = None, *, resume: str | None = None) -> list[dict[str, Any]]:
        """Run the stages from where they are, at most `steps` steps more; the metrics of all steps so far.

        `resume` is `auto`, a run or a checkpoint; where it is not given, that which the trainer was made with. Ctrl-C
        stops after a checkpoint; calling `train` again goes on. ConfigError where they cannot be.
        """
        check_steps(steps, self.rollouts.closed)
        with self.stop, status_on_signal(self._status), self.reporting.live(), failing_together(self.world):
            self._begin(resume)
            self.callbacks.on_start()
            last = self.resolved.steps
            until = last if steps is None else min(last, self.state.step + steps)
            self.due_evaluations.make_up()
            while self.state.step < until and not self.stop.on_any_rank():
                self._go_through(self._next_stage(), until)
            self._leave()
            self.callbacks.on_end(self.checkpointer.written())
        if self.stop.reason or (self.state.step == last and self.stop.signal is None):
            show_closing(self.reporting.console, self.path, self.state)
        return self.state.metrics

    def _status(self) -> str:
        return status(self.folder, self.world, self.resolved, self.state, self.meters, self.rollouts, self.checkpointer)

    def _go_through(self, stage: Stage, until: int) -> None:
        self._ready(stage)
        while self.state.stage_step < stage.steps and self.state.step < until and not self.stop.on_any_rank():
            with self._whole_step(stage), self.reporting.profiler(self.state.step + 1, self.state.metrics):
                collected = self._collect(stage)
                batch, metrics = self._score(stage, collected)
                metrics |= self._update(stage, batch)
                self._publish(stage)
                self._record(stage, collected, batch, metrics)
                self.callbacks.on_step(self.state.metrics[-1])  # before the checkpoint, which has what they made of it
                self.checkpointer.after_step(last=self.state.step == until)  # before the evaluation, which may fail
                self._report(stage, batch)
                self.callbacks.on_save(self.checkpointer.written())

    @contextlib.contextmanager
    def _whole_step(self, stage: Stage) -> Iterator[None]:
        """A step that is stopped or fails before its update gives its draws back, and the steps before it are saved."""
        version = self.state.version
        step = self.state.step
        self.meters.phases.start()
        try:
            yield
        except BaseException as error:
            if self.state.version == version:  # `_update` has not begun: no weight has seen these draws
                stage.roll_back()
            if isinstance(error, CollectionInterruptedError):
                return
            # A callback may have raised after the step was counted, which is whole then.
            whole = self.state.version == version or (isinstance(error, UserCodeError) and self.state.step > step)
            if whole and not isinstance(error, KeyboardInterrupt):
                self._leave(failed=True)
            if isinstance(error, UserCodeError):
                error.advice = self.checkpointer.advice()
            raise

    def _next_stage(self) -> Stage:
        """The stage of the next step, entered when the one before it is done."""
        while self.state.stage_step >= self.stages[self.state.stage_number].steps:  # a stage may have none
            self.enter(self.state.stage_number + 1)
        return self.stages[self.state.stage_number]

    def _collect(self, stage: Stage, more: int = 0) -> StepRollouts:
        """The step's rollouts, or `more` groups, drawn by rank 0. Raises CollectionInterruptedError on a stop."""
        collected = None
        what = f"the rollouts of step {self.state.step + 1}"
        with self.meters.phases("rollout"):
            try:
                if self.world.is_main:
                    collected = stage.collect_more(more) if more else stage.collect(self.state.stage_step)
                    with self.meters.phases("score"):
                        stage.call_functions(collected)
            except CollectionInterruptedError:  # the other ranks wait for a broadcast, and are to leave as well
                self.world.broadcast(None, what)
                raise
            collected = self.world.broadcast(collected, what)
        if collected is None:
            raise CollectionInterruptedError
        return collected

    def _score(self, stage: Stage, collected: StepRollouts) -> tuple[Batch, dict[str, Any]]:
        with self.meters.phases("score"):
            self.rollouts.engine.release()  # the log-probs of a reference need memory
            while more := stage.missing(collected):  # a round of groups in the place of dropped ones
                self._publish(stage)
                collected.further = self._collect(stage, more)
                self.rollouts.engine.release()
            batch, metrics = stage.score(collected)
            if self.world.size > 1:  # ranks that train on different batches would drift apart in silence
                self.world.same(batch.digest(), "the scored batch")
            return batch, metrics

    def _update(self, stage: Stage, batch: Batch) -> dict[str, Any]:
        device = self.training.policy.device
        with self.meters.phases("update"), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            # For an adapter's dropout.
            torch.manual_seed(seed_of(self.resolved.config.run.seed, "update", self.state.step))
            objective = stage.objective().at(self.state.stage_step, stage.steps)
            lr = stage.learning_rate(self.state.stage_step)
            self.state.version += 1  # before: an update that fails half-way has changed weights, and is not rolled back
            return self.training.learner.update(batch, objective, stage.config.optim, lr)

    def _publish(self, stage: Stage) -> None:
        """Hand the weights to the engine, when the stage samples with it."""
        with self.meters.phases("publish"):
            if stage.samples:
                self.rollouts.publish(self.state.version, self.training)

    def _record(self, stage: Stage, collected: StepRollouts, batch: Batch, metrics: dict[str, Any]) -> None:
        """Count the step and record what was measured."""
        self.batch = batch
        self.recorder.record(stage, collected, batch, metrics)
        self.due_evaluations.plan(stage)
        self.reporting.rollouts(self.state.step, batch, collected)

    def _report(self, stage: Stage, batch: Batch) -> None:
        """Evaluate where that is due, and write the step's line. A line that a kill prevents is in the checkpoint."""
        self.due_evaluations.after_step()
        row = self.state.metrics[-1]
        message = self.reporting.console.message
        self.reporting.step(row, batch)
        if (fewer := stage.fewer_updates(row)) is not None:
            message(fewer, "warning")
        finding = self.reporting.health.step(self.state.metrics, batch)
        stop_when_hopeless(self.state, self.config.run.max_nonfinite, finding, self.save, message)

    def evaluate(self, tasks: Any = None) -> dict[str, Any]:
        """Evaluate the policy as it is, on `tasks` or the run's evaluation tasks; results by metric name.

        Empty when the run was asked to stop meanwhile. DataError when there are no tasks; EvaluationError, on all
        ranks, when sampling, verifying or scoring failed or took too long; UserCodeError when the verifier raised on
        every answer before the first step; LostRankError when another rank is gone.
        """
        return self.evaluator.evaluate(tasks)

    def enter(self, number: int) -> None:
        """Begin a stage: a fresh optimizer, and a snapshot of the policy where a reference is kept."""
        self.state.stage_number = number
        self.state.stage_step = 0
        self.rollouts.engine.release()  # the backend and the snapshot take memory that an awake engine holds
        self.training.enter(self.stages[number])

    def _ready(self, stage: Stage) -> None:
        """Before a stage's next step: the baseline evaluation of a run, and the engine on the newest weights."""
        self.due_evaluations.at_start(stage)
        self._publish(stage)
        self.reporting.console.stage(stage.plan.name, stage.plan.allowed, self.state.stage_step, self.state.step)

    def _begin(self, resume: str | None) -> None:
        """Make or take over the run folder, once."""
        begun = self.folder.begun
        self.resumer.begin(resume)
        if not begun and self.meters.notice is not None:
            self.reporting.console.message(self.meters.notice)

    def _leave(self, failed: bool = False) -> None:
        """After the last step of a call of `train`: a checkpoint of it."""
        self.checkpointer.leave(failed)
        if self.stop:
            why = f" ({self.stop.reason})" if self.stop.reason else ""
            text = f"stopped after step {self.state.step}{why}; train again or --resume auto to go on"
            self.reporting.console.message(text, "info" if self.stop.reason else "warning")

    def save(self) -> Path:
        """Write a checkpoint of the last whole step; before `train`, of a fresh run, whose folder is made first."""
        self._begin(None)
        return self.checkpointer.save()

    def load(self, path: Path) -> None:
        """Restore the state of a checkpoint; before `train`, the run folder is taken as `train(resume=path)` does.
        CheckpointError names what does not fit."""
        if self.folder.begun:
            self.resumer.load(path)
        else:
            self._begin(str(path))

    def close(self) -> None:
        """End trackers, workers, engine and threads. The trainer cannot train afterwards."""
        self.world.notice()  # from here on each rank ends by itself, some later than others
        self.reporting.finish()
        self.rollouts.close()  # before the folder is released: its threads may still write warnings to log.txt
        self.checkpointer.close(wait=not self.stop.at_once)
        self.reporting.close()
        self.world.close()

    def __enter__(self) -> GRPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
