"""GRPOTrainer: builds the parts of a run and goes round the loop.

    tasks -> groups of rollouts -> verdicts -> rewards -> advantages -> policy loss -> new weights -> (again)

The loop is `_go_through`. It knows no algorithm by name: a stage says what is collected, how it is scored and what is
optimised. Invariants: a step is whole or has not happened (the draws of an interrupted one are given back); one line of
metrics per step; the engine never samples with other weights than the version that it claims.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlvr import registry
from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.config.stage_plan import StagePlan, longest_sequence, stage_plans
from rlvr.core.seeding import seed_of
from rlvr.core.signals import StopRequest, reporting
from rlvr.data import Draw, History, Prompts, load_tasks
from rlvr.data.prompts import refuse_long
from rlvr.distributed import Backend, World
from rlvr.distributed.farm import open_engine, prove
from rlvr.distributed.gpu_checks import check_gpus
from rlvr.distributed.models import write_base
from rlvr.distributed.prompt_lengths import encoded_lengths
from rlvr.distributed.step_meters import StepMeters
from rlvr.errors import (
    ConfigError,
    DataError,
    EvaluationError,
    LostRankError,
    TrainingError,
    UserCodeError,
    user_traceback,
)
from rlvr.evaluation import Tally, evaluate
from rlvr.evaluation.held_out import check_held_out
from rlvr.learner import Learner
from rlvr.monitor.batch import sample_rows, staleness_metrics
from rlvr.monitor.console import Console
from rlvr.monitor.guests import guests
from rlvr.monitor.health import Finding, Health
from rlvr.monitor.metrics import record
from rlvr.monitor.profile import StepProfiler
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.monitor.trackers import Tracker
from rlvr.planner import engine_of_run, plan_run
from rlvr.policy import Snapshot, given_policy, learning_rate, load_policy
from rlvr.policy.adapters import is_adapter
from rlvr.records import Batch, Rollout, Task, cut
from rlvr.rollout import (
    Activity,
    Collected,
    Collector,
    Engine,
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
from rlvr.run.given_objects import GivenObjects, kept_in_folder
from rlvr.run.run_folder import RunFolder
from rlvr.run.run_status import status
from rlvr.run.train_state import TrainState
from rlvr.stages import Parts, Stage
from rlvr.stages.choosing import chooser
from rlvr.verifiers import VerifierPool
from rlvr.verifiers.raised_verdicts import RaisedVerdicts
from rlvr.verifiers.routing import Verification

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
        self.config = config if isinstance(config, Config) else load_config(config)
        if isinstance(model, (str, Path)):
            named = self.config.model.model_copy(update={"path": str(model), "scratch": None})
            self.config, model = self.config.model_copy(update={"model": named}), None
        stage_plans(self.config)  # a wrong configuration is refused before ranks wait for each other
        self.world = World.from_environment(self.config.distributed.silence)
        self.seed = self.config.run.seed
        self._resume = resume
        saved = RunFolder(self.config).saved_engine(resume) if resume is not None and self.world.leads else None
        self.config, self.engine_reason = engine_of_run(self.config, self.world, saved)
        check_gpus(self.config, self.world, self.engine_reason)
        self.memory_plan = plan_run(self.config, self.world, model, eval_tasks)
        self.config = self.memory_plan.config
        self.plans = stage_plans(self.config)
        self._backends = registry.build("backend", self.config.distributed.backend_spec)
        if model is None:
            self.policy = load_policy(self.config.model, self.seed, self._backends.partitions, self.world.leads)
        else:
            self.policy = given_policy(model, tokenizer, self.config.model, self.seed, self._backends.partitions)
        leads = self.world.leads
        how = self.config.logging
        self.stop = StopRequest(STOPPING if leads and how.console != "off" else "")
        self.activity = Activity()
        self.meters = StepMeters(self.policy.home, self.world, self.activity.idle)
        self.phases = self.meters.phases
        self.console = Console(how.console if leads else "off", how.samples_every, counts=self.activity.counts)
        self.trackers = guests(how, self.config.run.name, trackers) if leads else []
        self.folder = RunFolder(self.config)
        self.health = Health(self.config.health, self.console, self.folder.health if leads else None)
        limit = math.inf if how.rollouts_gb is None else how.rollouts_gb * 1e9
        self.rollout_log = RolloutLog(self.folder.path, how.rollouts if leads else 0, limit)
        self.profiler = StepProfiler(self.folder.path, how.profile)

        self.state = TrainState()
        self.history = History()
        checks = self.config.verification
        self.pool = VerifierPool(
            checks.workers, checks.time_limit, checks.memory_mb, checks.concurrent, self.activity.patience
        )
        self.collector = Collector(lambda: bool(self.stop))
        self.prompts = Prompts(self.policy.tokenizer, report=self.console.message)
        self._tasks: dict[str, list[Task]] = {}
        self._given = {"train": tasks, "eval": eval_tasks}
        self.saver = Saver(self)
        self.due_evaluations = DueEvaluations(self)
        self._engines = contextlib.ExitStack()
        """Closes the engine, where one was opened."""

        self.batch: Batch | None = None
        self._begun = False
        self._published: Published | None = None
        try:
            self.verifications = [
                Verification(verifier if verifier is not None else plan.config.verifier, self.pool)
                for plan in self.plans
            ]
            self.engine = self._open_engine()
            self.context = min(self.policy.context, self.engine.context)  # vLLM may have been given a shorter one
            self.stages = [self._make_stage(number, plan) for number, plan in enumerate(self.plans)]
            self.folder.given = self._given_objects(model, verifier)
            self.enter(0)
        except BaseException as error:
            self.world.fail(error)
            self.close()
            raise

    def _open_engine(self) -> Engine:
        ahead = any(plan.config.rollout.staleness for plan in self.plans)
        engine = open_engine(
            self.config.rollout.engine,
            self.policy,
            self.config.rollout.in_flight if ahead else None,
            self.world,
            self.collector,
            self._backends.partitions,
            longest_sequence(self.plans, self._longest_evaluated),
        )
        self._engines.callback(engine.close)
        return engine

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
                self._begin(self._resume if resume is None else resume)
                until = sum(plan.allowed for plan in self.plans)
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
                self.console.finish()
        return self.state.metrics

    def _go_through(self, stage: Stage, until: int) -> None:
        self._ready(stage)
        while self.state.stage_step < stage.steps and self.state.step < until and not self._told_to_stop():
            with self._whole_step(stage), self.profiler(self.state.step + 1, self.state.metrics):
                collected = self._collect(stage)
                batch, metrics = self._score(stage, collected)
                metrics |= self._update(stage, batch)
                self._publish(stage)
                self._record(stage, collected, batch, metrics)
                self.saver.after_step(
                    last=self.state.step == until
                )  # before the evaluation, which may take hours and fail
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
        self.phases.start()
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
        with self.phases("rollout"):
            try:
                if self.world.leads:
                    collected = stage.collect(self.state.stage_step)
                    with self.phases("score"):
                        stage.call_functions(collected)
            except Interrupted:
                self.world.broadcast(None, what)
                raise
            collected = self.world.broadcast(collected, what)
        if collected is None:
            raise Interrupted
        return collected

    def _score(self, stage: Stage, collected: Collected) -> tuple[Batch, dict[str, Any]]:
        with self.phases("score"):
            self.engine.release()  # the log-probs of a reference need memory, and are computed with its weights in place
            batch, metrics = stage.score(collected)
            if self.world.size > 1:
                self.world.same(batch.digest(), "the scored batch")
            return batch, metrics

    def _update(self, stage: Stage, batch: Batch) -> dict[str, Any]:
        device = self.policy.device
        with self.phases("update"), torch.random.fork_rng([] if device.type == "cpu" else [device]):
            torch.manual_seed(seed_of(self.seed, "update", self.state.step))  # for an adapter's dropout
            objective = stage.objective().at(self.state.stage_step, stage.steps)
            lr = learning_rate(stage.config.optim, self.state.stage_step, stage.steps)
            self.state.version += 1
            return self.learner.update(batch, objective, stage.config.optim, lr)

    def _publish(self, stage: Stage) -> None:
        """Hand the weights to the engine, when the stage samples with it."""
        with self.phases("publish"):
            if stage.samples:
                self._hand_over()

    def _hand_over(self) -> None:
        """Publish the weights, and prove that the engine has them. TrainingError when it has not."""
        if not self.engine.shares_weights or self.config.distributed.offloads_during_rollout:
            self.backend.release()
        self._published = self.engine.publish(self.state.version, self.backend.named_weights)
        if not self.engine.shares_weights:
            coarse = bool(low_precision(self.config.rollout.engine))
            prove(self.engine, self.world, self.policy, self.collector, self.backend.named_weights, coarse)

    def _record(self, stage: Stage, collected: Collected, batch: Batch, metrics: dict[str, Any]) -> None:
        """Count the step: what was measured, and how long it took."""
        self.history.record_rollouts([*collected.rollouts, *collected.dropped])
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
        if self.world.leads:
            self.folder.check_held()  # before anything is written
        self.rollout_log.later(self.state.step, batch, collected.rollouts, collected.dropped, collected.columns)

    def _report(self, stage: Stage, batch: Batch) -> None:
        """Evaluate where that is due, and write the step's line. A line that a kill prevents is in the checkpoint."""
        self.due_evaluations.after_step()
        row = self.state.metrics[-1]
        if self.world.leads:
            self.folder.check_held()
            self.folder.metrics.append(row)
        for tracker in self.trackers:
            tracker.log(self.state.step, row)
            tracker.log_rollouts(self.state.step, sample_rows(batch))
        self.console.step(row, batch)
        if (fewer := stage.fewer_updates(row)) is not None:
            self.console.message(fewer, "warning")
        self._stop_when_hopeless(row, self.health.step(self.state.metrics, batch))

    def _times(self, collected: Collected, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The step's time, memory and use of the devices."""
        apart = devices_apart(self.config.rollout.engine)
        starting = self.state.step == self.saver.first_step  # most of whose time is that of starting, not of sampling
        sampled = metrics.get("tokens/sampled")
        return self.meters.finish(sampled, collected.verifying, self.learner.computed, apart, starting)

    def _stop_when_hopeless(self, row: Mapping[str, Any], finding: Finding | None) -> None:
        """TrainingError, after a checkpoint, when too many steps in a row had to be skipped or a monitor is told to stop."""
        if self.state.nonfinite:
            text = f"step {self.state.step}: the loss or gradient was not finite; its update was skipped"
            self.console.message(text, "warning")
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
        plan, verification = self.plans[self.state.stage_number], self.verifications[self.state.stage_number]
        chosen = load_tasks(tasks, split="eval") if tasks is not None else self.evaluation_tasks(plan.config)
        if not chosen:
            raise DataError("there are no tasks to evaluate on: set data.eval or evaluation.data")
        start = time.perf_counter()
        prompts = self.prompts.under(plan.config.data.template)
        if tasks is not None:
            prompts = Prompts(self.policy.tokenizer, plan.config.data.template)  # kept for as long as these tasks
            lengths = encoded_lengths(prompts, self.world, chosen)[0]
            refuse_long(chosen, lengths, self.context)
            response = plan.config.evaluation.max_new_tokens or plan.config.rollout.max_new_tokens
            cut = int((lengths > self.context - response).sum())
            if cut and self.context < self.policy.context:  # which was chosen for the run's own tasks
                self.console.message(
                    f"the engine's context of {self.context} tokens leaves less than {response} tokens for responses to {cut} of the "
                    f"{len(chosen)} evaluation tasks: rollout.engine's max_model_len sets it",
                    "warning",
                )

        def collect(draws: Sequence[Draw], sampling: Sampling, samples: int) -> list[Rollout]:
            means = self._means(verification, prompts, sampling, samples, "evaluation")
            samples_with = evaluation_plan(plan.config.rollout.plan)
            return self.collector.collect(draws, samples_with, means, plan.config.rollout.deadline)

        def judge(verdicts: RaisedVerdicts) -> None:
            if (
                not self.state.step
            ):  # later the run has shown that the verifier works, and goes on without this evaluation's figures
                verdicts.refuse_all("of the evaluation at the start")

        self._hand_over()
        results, tallies, failure = {}, list[Tally](), None
        if self.world.leads:
            try:
                scorer = chooser(plan.config, self.policy, chosen, self._backends.partitions)
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
        if self._begun and self.world.leads:
            self.folder.keep_evaluation(row, tallies)
        self.console.evaluation(self.state.step, results)
        return results

    def evaluation_tasks(self, config: Config) -> list[Task]:
        """The tasks that are evaluated on under a stage's configuration."""
        given = self._given["eval"] if self._given["eval"] is not None else config.data.eval
        spec = config.evaluation.data if config.evaluation.data is not None else given
        return [] if spec is None else self._load(spec, "eval", config)[: config.evaluation.limit]

    def _longest_evaluated(self, plan: StagePlan) -> int:
        """Tokens of the longest prompt that a stage is evaluated on; 0 without any."""
        tasks = self.evaluation_tasks(plan.config)
        prompts = self.prompts.under(plan.config.data.template)
        return int(encoded_lengths(prompts, self.world, tasks)[0].max(initial=0))

    # tasks and stages

    def _load(self, spec: Any, split: str, config: Config) -> list[Task]:
        """The tasks that `spec` writes, read once."""
        given = spec is self._given[split]  # its text would be long, and its identity lasts as long as we do
        key = f"{split} {config.data.fields!r} {id(spec) if given else spec!r}"
        if key not in self._tasks:
            self._tasks[key] = load_tasks(spec, split=split, fields=config.data.fields)
        return self._tasks[key]

    def _given_objects(self, model: Any, verifier: Any) -> GivenObjects:
        """What the run folder is to say of the objects that the trainer was given."""
        data = self.config.data
        tasks = {
            split: self._load(written if self._given[split] is None else self._given[split], split, self.config)
            for split, written in {"train": data.train, "eval": data.eval}.items()
            if kept_in_folder(self.config, split, self._given[split])
        }
        verifiers = {
            task.verifier for of_split in self._tasks.values() for task in of_split if task.verifier is not None
        }
        return GivenObjects(self.config, model, verifier, self._given, tasks, verifiers)

    def _make_stage(self, number: int, plan: StagePlan) -> Stage:
        """The stage of a plan, with its tasks checked, so that bad ones are refused before time is spent."""
        spec = self._given["train"] if self._given["train"] is not None else plan.config.data.train
        if spec is None:
            raise ConfigError("the config names no tasks: set data.train to a file, a folder, a hub name or a source")
        tasks = self._load(spec, "train", plan.config)[: plan.config.data.limit]
        prompts = self.prompts.under(plan.config.data.template)
        lengths = partial(encoded_lengths, prompts, self.world)

        def means(sampling: Sampling) -> RolloutContext:
            group_size = plan.config.rollout.group_size
            return self._means(self.verifications[number], prompts, sampling, group_size, "rollout", number)

        shares = self.engine.shares_weights
        leads = self.world.leads
        parts = Parts(self.policy, self.history, prompts, lengths, self.collector, means, self.context, shares, leads)
        make = registry.find("stage", plan.kind)
        stage: Stage = make(plan, parts, tasks, seed_of(self.seed, number, "sampler"), **plan.options)
        if stage.left_out:
            self.console.message(f"stage {plan.name}: {stage.left_out} tasks are left out, they are too long")
        if stage.verifies and self.world.leads:
            self.verifications[number].check(stage.pool)
        held_out = self.evaluation_tasks(plan.config)
        check_held_out(plan.config, held_out, lengths(held_out)[0], self.context, len(self.plans))
        chooser(plan.config, self.policy, held_out, self._backends.partitions)  # refuses tasks that it cannot score
        if self.world.leads:
            self.verifications[number].check(held_out)
        return stage

    def _means(
        self, verification: Verification, prompts: Prompts, sampling: Sampling, group_size: int, *path: int | str
    ) -> RolloutContext:
        """What a plan works with. Seeds follow a path, so that nothing depends on the order of events (N7)."""
        return RolloutContext(
            self.engine,
            verification,
            prompts,
            sampling,
            group_size,
            context=self.context,
            history=self.history,
            seed_path=(self.seed, *path),
            activity=self.activity,
        )

    def enter(self, number: int) -> None:
        """Come to the start of a stage: a fresh optimizer, and a snapshot of the policy where a reference is kept."""
        self.state.stage_number = number
        self.state.stage_step = 0
        stage = self.stages[number]
        self.engine.release()  # the backend and the snapshot take memory, which an engine that is awake has taken
        self.backend: Backend = self._backends.open(self.policy, stage.config.optim.optimizer, self.world)
        stage.reference = Snapshot(self.policy, stage.reference_follows) if stage.keeps_reference else None
        self.learner = Learner(self.backend, stage.reference, self.world)

    def _ready(self, stage: Stage) -> None:
        """Before a stage's next step: the baseline evaluation of a run, and the engine on the newest weights."""
        self.due_evaluations.at_start(stage)
        self._publish(stage)
        self.console.stage(stage.plan.name, stage.plan.allowed, self.state.stage_step)

    # beginning, saving and ending

    def _begin(self, resume: str | None) -> None:
        """Make or take over the run folder, once."""
        if self._begun:
            return
        found = self.saver.begin(resume)
        self._begun = True
        if is_adapter(self.policy.model) and self.config.model.scratch is not None:
            write_base(self.policy, self.folder.path / "base", self.world.leads)
        for tracker in self.trackers:
            tracker.start(self.config.dump(), self.folder.path)
        self.console.start(
            [
                *plan_lines(self.config, self.plans, self.folder.path, [s.longest_response for s in self.stages]),
                *([self.engine_reason] if self.engine_reason is not None else []),
                self.memory_plan.brief,
            ]
        )
        if self.meters.notice is not None:
            self.console.message(self.meters.notice)
        if found is not None:
            self.console.message(f"resumed from {found}: step {self.state.step}")

    def _leave(self, failed: bool = False) -> None:
        """After the last step of a call of `train`: a checkpoint of it."""
        self.saver.leave(failed)
        if self.stop:
            self.console.message(
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
        if self._begun:
            self.saver.load(path)
        else:
            self._begin(str(path))

    def close(self) -> None:
        """End trackers, workers, engine and threads. The trainer cannot train afterwards."""
        self.world.notice()  # from here on each rank ends by itself, some later than others
        for tracker in self.trackers:
            tracker.finish()
        self.console.finish()
        self.collector.close()
        self._engines.close()
        self.pool.close()
        self.saver.close()
        self.rollout_log.close()
        self.world.close()

    def __enter__(self) -> GRPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
