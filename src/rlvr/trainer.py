"""GRPOTrainer: builds the parts of a run and goes round the loop.

    tasks -> groups of rollouts -> verdicts -> rewards -> advantages -> policy loss -> new weights -> (again)

The loop is `_go_through`. It knows no algorithm by name: a stage says what is collected, how it is scored and what is
optimised. Invariants: a step is whole or has not happened (the draws of an interrupted one are given back); one line of
metrics per step; the engine never samples with other weights than the version that it claims.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlvr import registry
from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import StagePlan, stage_plans
from rlvr.core.seeding import seed_of
from rlvr.core.waits import StopRequest, reporting
from rlvr.data import Draw, Prompts, load_tasks
from rlvr.data.prompts import refuse_long
from rlvr.distributed import World
from rlvr.distributed.farm import prove
from rlvr.distributed.models import write_base
from rlvr.distributed.prompt_lengths import encoded_lengths
from rlvr.distributed.step_meters import StepMeters
from rlvr.errors import (
    DataError,
    EvaluationError,
    LostRankError,
    TrainingError,
    UserCodeError,
    user_traceback,
)
from rlvr.evaluation import Tally, evaluate
from rlvr.monitor.batch import staleness_metrics
from rlvr.monitor.health import Finding
from rlvr.monitor.metrics import record
from rlvr.monitor.trackers import Tracker
from rlvr.policy import Policy, learning_rate
from rlvr.policy.adapters import is_adapter
from rlvr.records import Batch, Rollout, cut
from rlvr.rollout import (
    Collected,
    Interrupted,
    Published,
    RolloutContext,
    Sampling,
    evaluation_plan,
)
from rlvr.rollout.vllm.options import devices_apart, low_precision
from rlvr.run.checkpointing import Saver
from rlvr.run.dry_run import plan_lines
from rlvr.run.due_evaluations import DueEvaluations
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.reporting import Reporting
from rlvr.run.resolved_config import resolved_config, with_model_path
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_folder import RunFolder
from rlvr.run.run_status import status
from rlvr.run.run_tasks import RunTasks
from rlvr.run.stage_list import StageList, open_stage
from rlvr.run.train_state import TrainState
from rlvr.stages import Stage
from rlvr.stages.choosing import chooser
from rlvr.verifiers.pool import Verification
from rlvr.verifiers.raised_verdicts import RaisedVerdicts

STOPPING = "stopping as soon as this step can be left, with a checkpoint; Ctrl-C once more stops at once"


class GRPOTrainer:
    """Trains a policy on tasks with a verifier.

        trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", tasks, MathVerifier(), {"run": {"steps": 100}})
        trainer.train()

    `model` is a loaded model (with `tokenizer`; it is moved to the config's `model.device`), a path or hub name, or None to
    build what the config says. `tasks` and `eval_tasks` are anything that `rlvr.data.load_tasks` takes, or None for the
    config's. `verifier` is a Verifier, a plain reward function, a registered name, or None for the config's. `config` is a
    Config, a mapping or a YAML file. `resume` is what `train` goes on from, as there; given here, the engine of `rollout.engine: auto`
    is the checkpoint's.

    After `train()`: `metrics` (one record per step), `evaluations`, `batch` (the last one scored), `policy`. Raises
    RlvrError for bad input before any training.
    """

    def __init__(
        self,
        model: Any = None,
        tasks: Any = None,
        verifier: Any = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        eval_tasks: Any = None,
        tokenizer: Any = None,
        trackers: Sequence[Tracker] = (),
        resume: str | None = None,
    ) -> None:
        registry.leave_loaded_script()
        config = config if isinstance(config, Config) else load_config(config)
        if isinstance(model, (str, Path)):
            config = with_model_path(config, model)
            model = None
        stage_plans(config)  # a wrong configuration is refused before ranks wait for each other
        self.world = World.from_environment(config.distributed.silence)
        self.resolved = resolved_config(config, self.world, resume, model, eval_tasks)
        self.training = PolicyTraining(self.config, self.world, model, tokenizer)
        shows = self.world.leads and self.config.logging.console != "off"
        self.stop = StopRequest(STOPPING if shows else "")
        self.rollouts = RolloutRuntime(self.config, self.stop)
        self.meters = StepMeters(self.policy.home, self.world, self.rollouts.activity.idle)
        self.folder = RunFolder(self.config)
        counts = self.rollouts.activity.counts
        self.reporting = Reporting(self.config, self.folder, self.world.leads, counts, trackers)
        prompts = Prompts(self.policy.tokenizer, report=self.reporting.console.message)
        self.tasks = RunTasks(tasks, eval_tasks, prompts, self.world)
        self.state = TrainState()
        self.stages = StageList()
        self.saver = Saver(self)
        self.due_evaluations = DueEvaluations(self)
        self.batch: Batch | None = None
        """The last batch that was scored."""
        self._published: Published | None = None
        try:
            self.rollouts.open(self.resolved, self.training, self.tasks, self.world, verifier)
            for number, plan in enumerate(self.resolved.plans):
                self.stages.append(self._open_stage(number, plan))
            self.folder.given = self.tasks.given_objects(self.config, model, verifier)
            self.enter(0)
        except BaseException as error:
            self.world.fail(error)
            self.close()
            raise

    def _open_stage(self, number: int, plan: StagePlan) -> Stage:
        prompts = self.tasks.prompts.under(plan.config.data.template)
        sampling = Sampling(plan.config.rollout.max_new_tokens)  # the stage sets that of each step
        group_size = plan.config.rollout.group_size
        verification = self.rollouts.verifications[number]
        context = self._rollout_context(verification, prompts, sampling, group_size, "rollout", number)
        return open_stage(
            plan,
            number,
            len(self.resolved.plans),
            self.training,
            self.rollouts,
            self.tasks,
            context,
            self.world.leads,
            self.reporting.console.message,
        )

    @property
    def config(self) -> Config:
        """The configuration of the run, without `auto`."""
        return self.resolved.config

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.training.policy

    @property
    def step(self) -> int:
        """Steps done, over all stages."""
        return self.state.step

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record for each step done."""
        return self.state.metrics

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row of results for each evaluation, with its step and stage."""
        return self.state.evaluations

    # the loop

    def train(self, steps: int | None = None, *, resume: str | None = None) -> list[dict[str, Any]]:
        """Run the stages from where they are, at most `steps` steps more; the metrics of all steps so far.

        `resume` is `auto`, a run or a checkpoint; where it is not given, that which the trainer was made with. Ctrl-C stops after a
        checkpoint; calling `train` again goes on.
        """
        with self.stop, reporting(lambda: status(self)):
            try:
                self._begin(self.resolved.resume if resume is None else resume)
                until = self.resolved.steps
                until = until if steps is None else min(until, self.state.step + steps)
                self.due_evaluations.make_up()
                while self.state.step < until and not self._told_to_stop():
                    self._go_through(self._next_stage(), until)
                self._leave()
            except SystemExit as error:  # of a piece of the user's that nothing asked about: the run is not done
                problem = f"code that the run called asked Python to exit ({error.code})"
                stopped = UserCodeError(problem, cut(user_traceback(error)))
                self.world.fail(stopped)
                raise stopped from error
            except BaseException as error:
                self.world.fail(error)
                raise
            finally:
                self.reporting.console.finish()
        return self.state.metrics

    def _go_through(self, stage: Stage, until: int) -> None:
        self._ready(stage)
        while self.state.stage_step < stage.steps and self.state.step < until and not self._told_to_stop():
            with self._whole_step(stage), self.reporting.profiler(self.state.step + 1, self.state.metrics):
                collected = self._collect(stage)
                batch, metrics = self._score(stage, collected)
                metrics |= self._update(stage, batch)
                self._publish(stage)
                self._record(stage, collected, batch, metrics)
                # Before the evaluation, which may take hours and fail.
                self.saver.after_step(last=self.state.step == until)
                self._report(stage, batch)

    def _told_to_stop(self) -> bool:
        """Whether any rank was told to; the same answer on every rank."""
        if self.world.size > 1:
            told = self.world.gather(self.stop.signal, "whether to go on")
            self.stop.signal = self.stop.signal or next((number for number in told if number), None)
            return any(told)
        return bool(self.stop)

    @contextlib.contextmanager
    def _whole_step(self, stage: Stage) -> Iterator[None]:
        """A step that is stopped or fails before its update gives its draws back, and the steps before it are saved."""
        version = self.state.version
        self.meters.phases.start()
        try:
            yield
        except BaseException as error:
            if self.state.version == version:
                stage.give_back()
            if isinstance(error, Interrupted):
                return
            if self.state.version == version and not isinstance(error, KeyboardInterrupt):
                self._leave(failed=True)
            if isinstance(error, UserCodeError):
                error.advice = self.saver.advice()
            raise

    def _next_stage(self) -> Stage:
        """The stage of the next step, entered when the one before it is done."""
        while self.state.stage_step >= self.stages[self.state.stage_number].steps:
            self.enter(self.state.stage_number + 1)
        return self.stages[self.state.stage_number]

    def _collect(self, stage: Stage) -> Collected:
        """The step's rollouts, which rank 0 draws and values by the user's functions. Raises Interrupted when the run is to stop."""
        collected, what = None, f"the rollouts of step {self.state.step + 1}"
        with self.meters.phases("rollout"):
            try:
                if self.world.leads:
                    collected = stage.collect(self.state.stage_step)
                    with self.meters.phases("score"):
                        stage.call_functions(collected)
            except Interrupted:
                self.world.broadcast(None, what)
                raise
            collected = self.world.broadcast(collected, what)
        if collected is None:
            raise Interrupted
        return collected

    def _score(self, stage: Stage, collected: Collected) -> tuple[Batch, dict[str, Any]]:
        with self.meters.phases("score"):
            self.rollouts.engine.release()  # the log-probs of a reference need memory, and are computed with its weights in place
            batch, metrics = stage.score(collected)
            if self.world.size > 1:
                self.world.same(batch.digest(), "the scored batch")
            return batch, metrics

    def _update(self, stage: Stage, batch: Batch) -> dict[str, Any]:
        device = self.policy.device
        with self.meters.phases("update"), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(seed_of(self.config.run.seed, "update", self.state.step))  # for an adapter's dropout
            objective = stage.objective().at(self.state.stage_step, stage.steps)
            lr = learning_rate(stage.config.optim, self.state.stage_step, stage.steps)
            self.state.version += 1
            return self.training.learner.update(batch, objective, stage.config.optim, lr)

    def _publish(self, stage: Stage) -> None:
        """Hand the weights to the engine, when the stage samples with it."""
        with self.meters.phases("publish"):
            if stage.samples:
                self._hand_over()

    def _hand_over(self) -> None:
        """Publish the weights, and prove that the engine has them. TrainingError when it has not."""
        if not self.rollouts.engine.shares_weights or self.config.distributed.offloads_during_rollout:
            self.training.backend.release()
        self._published = self.rollouts.engine.publish(self.state.version, self.training.backend.named_weights)
        if not self.rollouts.engine.shares_weights:
            coarse = bool(low_precision(self.config.rollout.engine))
            prove(
                self.rollouts.engine,
                self.world,
                self.policy,
                self.rollouts.collector,
                self.training.backend.named_weights,
                coarse,
            )

    def _record(self, stage: Stage, collected: Collected, batch: Batch, metrics: dict[str, Any]) -> None:
        """Count the step: what was measured, and how long it took."""
        self.rollouts.history.record_rollouts([*collected.rollouts, *collected.dropped])
        metrics |= stage.scheduled(self.state.stage_step)
        self.state.step += 1
        self.state.stage_step += 1
        self.batch = batch
        metrics |= (
            self._times(collected, metrics)
            | staleness_metrics(batch, self.state.version - 1)
            | {
                "step": self.state.step,
                "run/stage": stage.plan.name,
                "run/epoch": stage.sampler.epoch,
                "policy/version": self.state.version,
                **(self._published.metrics() if self._published and stage.samples else {}),
                **collected.metrics(),
            }
        )
        # log-probs of recorded responses are those of the policy that was recorded, and controllers steer the one that trains
        if not stage.samples or metrics.get("entropy") is None:
            metrics["entropy"] = metrics.get("entropy/trained")
        metrics = self.world.broadcast(metrics, "the metrics")  # what moves with them must move alike on all ranks
        stage.observe(metrics)
        row = record(metrics)
        self.state.metrics.append(row)
        self.state.nonfinite = self.state.nonfinite + 1 if row["skipped/nonfinite"] else 0
        self.due_evaluations.plan(stage)
        self.reporting.rollouts(self.state.step, batch, collected)

    def _report(self, stage: Stage, batch: Batch) -> None:
        """Evaluate where that is due, and write the step's line. A line that a kill prevents is in the checkpoint."""
        self.due_evaluations.after_step()
        row = self.state.metrics[-1]
        self.reporting.step(row, batch)
        if (fewer := stage.fewer_updates(row)) is not None:
            self.reporting.console.message(fewer, "warning")
        self._stop_when_hopeless(self.reporting.health.step(self.state.metrics, batch))

    def _times(self, collected: Collected, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The step's time, memory and use of the devices."""
        apart = devices_apart(self.config.rollout.engine)
        starting = self.state.step == self.saver.first_step  # most of whose time is that of starting, not of sampling
        sampled = metrics.get("tokens/sampled")
        return self.meters.finish(sampled, collected.verifying, self.training.learner.computed, apart, starting)

    def _stop_when_hopeless(self, finding: Finding | None) -> None:
        """TrainingError, after a checkpoint, when too many steps in a row had to be skipped or a monitor is told to stop."""
        if self.state.nonfinite:
            text = f"step {self.state.step}: the loss or gradient was not finite; its update was skipped"
            self.reporting.console.message(text, "warning")
        if self.state.nonfinite >= self.config.run.max_nonfinite:
            raise TrainingError(
                f"the loss or gradient was not finite for {self.state.nonfinite} steps in a row; stopped with the checkpoint "
                f"{self.save()}. Lower optim.lr, or look at the rewards and log-probs of the last rollouts"
            )
        if finding is not None:
            raise TrainingError(f"health.{finding}. Stopped with the checkpoint {self.save()}")

    # evaluation

    def evaluate(self, tasks: Any = None) -> dict[str, Any]:
        """Evaluate the policy as it is, on `tasks` or the run's evaluation tasks; results by metric name.

        Empty when the run was told to stop meanwhile. DataError when there are no tasks; EvaluationError, on all ranks, when
        sampling, verifying or scoring failed or took too long; UserCodeError when the verifier raised on every answer before the
        first step; LostRankError when another rank is gone.
        """
        plan, verification = (
            self.resolved.plans[self.state.stage_number],
            self.rollouts.verifications[self.state.stage_number],
        )
        chosen = load_tasks(tasks, split="eval") if tasks is not None else self.tasks.evaluation(plan.config)
        if not chosen:
            raise DataError("there are no tasks to evaluate on: set data.eval or evaluation.data")
        start = time.perf_counter()
        prompts = self.tasks.prompts.under(plan.config.data.template)
        if tasks is not None:
            prompts = Prompts(self.policy.tokenizer, plan.config.data.template)  # kept for as long as these tasks
            lengths = encoded_lengths(prompts, self.world, chosen)[0]
            refuse_long(chosen, lengths, self.rollouts.context)
            response = plan.config.evaluation.max_new_tokens or plan.config.rollout.max_new_tokens
            cut = int((lengths > self.rollouts.context - response).sum())
            if cut and self.rollouts.context < self.policy.context:  # which was chosen for the run's own tasks
                self.reporting.console.message(
                    f"the engine's context of {self.rollouts.context} tokens leaves less than {response} tokens for responses to {cut} of the "
                    f"{len(chosen)} evaluation tasks: rollout.engine's max_model_len sets it",
                    "warning",
                )

        def collect(draws: Sequence[Draw], sampling: Sampling, samples: int) -> list[Rollout]:
            context = self._rollout_context(verification, prompts, sampling, samples, "evaluation")
            samples_with = evaluation_plan(plan.config.rollout.plan)
            return self.rollouts.collector.collect(draws, samples_with, context, plan.config.rollout.deadline)

        def judge(verdicts: RaisedVerdicts) -> None:
            if (
                not self.state.step
            ):  # later the run has shown that the verifier works, and goes on without this evaluation's figures
                verdicts.refuse_all("of the evaluation at the start")

        self._hand_over()
        results, tallies, failure = {}, list[Tally](), None
        if self.world.leads:
            try:
                scorer = chooser(plan.config, self.policy, chosen, self.training.partitions)
                done = evaluate(chosen, plan.config, collect, verification.same_answer, scorer=scorer, judge=judge)
                results, tallies = {**done.results, "time/evaluate": time.perf_counter() - start}, done.tallies
            except Interrupted:
                pass
            except (UserCodeError, LostRankError):
                raise
            except Exception as error:  # whatever a verifier, an engine or a scorer raises: the other ranks wait
                failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        results, told = self.world.broadcast((results, told), "the evaluation")
        if told is not None:
            raise EvaluationError(f"the evaluation at step {self.state.step} failed: {told}") from failure
        if not results:
            return {}
        row = {"step": self.state.step, "stage": plan.name, **results}
        self.state.evaluations.append(row)
        self.reporting.evaluation(row, results, tallies)
        return results

    # tasks and stages

    def _rollout_context(
        self, verification: Verification, prompts: Prompts, sampling: Sampling, group_size: int, *path: int | str
    ) -> RolloutContext:
        """What a plan works with. Seeds follow a path, so that nothing depends on the order of events (N7)."""
        return RolloutContext(
            self.rollouts.engine,
            verification,
            prompts,
            sampling,
            group_size,
            context=self.rollouts.context,
            history=self.rollouts.history,
            seed_path=(self.config.run.seed, *path),
            activity=self.rollouts.activity,
        )

    def enter(self, number: int) -> None:
        """Come to the start of a stage: a fresh optimizer, and a snapshot of the policy where a reference is kept."""
        self.state.stage_number = number
        self.state.stage_step = 0
        self.rollouts.engine.release()  # the backend and the snapshot take memory, which an engine that is awake has taken
        self.training.enter(self.stages[number])

    def _ready(self, stage: Stage) -> None:
        """Before a stage's next step: the baseline evaluation of a run, and the engine on the newest weights."""
        self.due_evaluations.at_start(stage)
        self._publish(stage)
        self.reporting.console.stage(stage.plan.name, stage.plan.allowed, self.state.stage_step)

    # beginning, saving and ending

    def _begin(self, resume: str | None) -> None:
        """Make or take over the run folder, once."""
        if self.folder.begun:
            return
        found = self.saver.begin(resume)
        self.folder.begun = True
        if is_adapter(self.policy.model) and self.config.model.scratch is not None:
            write_base(self.policy, self.folder.path / "base", self.world.leads)
        longest = [stage.longest_response for stage in self.stages]
        lines = plan_lines(self.config, self.resolved.plans, self.folder.path, longest)
        if self.resolved.engine_reason is not None:
            lines.append(self.resolved.engine_reason)
        self.reporting.start(self.config, [*lines, self.resolved.memory_plan.brief])
        if self.meters.notice is not None:
            self.reporting.console.message(self.meters.notice)
        if found is not None:
            self.reporting.console.message(f"resumed from {found}: step {self.state.step}")

    def _leave(self, failed: bool = False) -> None:
        """After the last step of a call of `train`: a checkpoint of it."""
        self.saver.leave(failed)
        if self.stop:
            self.reporting.console.message(
                f"stopped after step {self.state.step}; train again or --resume auto to go on", "warning"
            )

    def save(self) -> Path:
        """Write a checkpoint of the run as it is after the last whole step; before `train`, of a fresh run, whose folder is
        taken as `train` does."""
        self._begin(None)
        return self.saver.save()

    def load(self, path: Path) -> None:
        """Take back the state of a checkpoint; before `train`, the run folder is taken as `train(resume=path)` does.
        CheckpointError names what does not fit."""
        if self.folder.begun:
            self.saver.load(path)
        else:
            self._begin(str(path))

    def close(self) -> None:
        """End trackers, workers, engine and threads. The trainer cannot train afterwards."""
        self.world.notice()  # from here on each rank ends by itself, some later than others
        self.reporting.finish()
        self.rollouts.close()
        self.saver.close()
        self.reporting.close()
        self.world.close()

    def __enter__(self) -> GRPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
