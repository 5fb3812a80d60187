"""GRPOTrainer: builds the parts of a run and goes round the loop.

    tasks -> groups of rollouts -> verdicts -> rewards -> advantages -> policy loss -> new weights -> (again)

The loop is `_go_through`. It knows no algorithm by name: a stage says what is collected, how it is scored and what is
optimised. Invariants: a step is whole or has not happened (an interrupted one is given back to the sampler); one line of
metrics per step; the engine never samples with other weights than the version it claims.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlvr import registry
from rlvr.config import Config, StagePlan, load_config, stage_plans
from rlvr.data import Draw, History, Template, load_tasks, render_prompt
from rlvr.distributed import Backend, checkpoint
from rlvr.dry_run import plan_lines
from rlvr.errors import ConfigError, DataError, TrainingError
from rlvr.evaluation import evaluate
from rlvr.learner import Learner
from rlvr.monitor.batch import sample_rows
from rlvr.monitor.console import Console
from rlvr.monitor.metrics import record
from rlvr.monitor.phases import Phases
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.monitor.trackers import Tracker
from rlvr.monitor.wandb_tracker import WandbTracker
from rlvr.policy import Snapshot, learning_rate, load_policy, make_policy
from rlvr.policy.adapters import is_adapter, save_base
from rlvr.records import Batch, Rollout, Task
from rlvr.rollout import Collector, Interrupted, Means, Sampling, Timing
from rlvr.run_folder import RunFolder
from rlvr.seeding import seed_of
from rlvr.signals import StopRequest
from rlvr.stages import Parts, Stage
from rlvr.verifiers import VerifierPool
from rlvr.verifiers.routing import Verification

log = logging.getLogger(__name__)


class GRPOTrainer:
    """Trains a policy on tasks with a verifier.

        trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", tasks, MathVerifier(), {"run": {"steps": 100}})
        trainer.train()

    `model` is a loaded model (with `tokenizer`), a path or hub name, or None to build what the config says. `tasks` and
    `eval_tasks` are anything that `rlvr.data.load_tasks` takes, or None for the config's. `verifier` is a Verifier, a
    plain reward function, a registered name, or None for the config's. `config` is a Config, a mapping or a YAML file.

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
    ) -> None:
        self.config = config if isinstance(config, Config) else load_config(config)
        if isinstance(model, (str, Path)):
            self.config = self.config.model_copy(
                update={"model": self.config.model.model_copy(update={"path": str(model), "scratch": None})}
            )
            model = None
        self.plans = stage_plans(self.config)
        self.seed = self.config.run.seed
        if model is None:
            self.policy = load_policy(self.config.model, self.seed)
        else:
            self.policy = make_policy(model, tokenizer or _tokenizer_of(model), self.config.model, self.seed)
        self.given_tasks, self.given_eval_tasks = tasks, eval_tasks

        self.stop = StopRequest()
        self.history = History()
        checks = self.config.verification
        self.pool = VerifierPool(checks.workers, checks.time_limit, checks.memory_mb)
        self.verifications = [
            Verification(verifier if verifier is not None else plan.config.verifier, self.pool) for plan in self.plans
        ]
        self.engine = registry.build("engine", self.config.rollout.engine).open(self.policy)
        self.collector = Collector(lambda: bool(self.stop))
        self.folder = RunFolder(self.config)
        self.console = Console(self.config.logging.console, self.config.logging.samples_every)
        self.trackers = [*trackers, *_trackers(self.config)]
        self.phases = Phases()

        self.step = 0
        """Steps done, over all stages."""
        self.version = 0
        """Version of the policy's weights."""
        self.stage_number, self.stage_step = 0, 0
        self.stage: Stage | None = None
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.batch: Batch | None = None
        self.backend: Backend | None = None
        self._nonfinite = 0
        self._begun = False
        self._whole = True
        """Whether the last step that was begun is done; a step that failed half-way is not saved."""
        self._owes_evaluation = False
        """Whether the evaluation at this step was cut off by a stop; it is made up for when training goes on."""
        self._prompts: dict[tuple[str, str], tuple[int, ...]] = {}
        self._tasks: dict[str, list[Task]] = {}
        try:
            self._check_stages()
        except BaseException:
            self.close()
            raise

    @property
    def plan(self) -> StagePlan:
        """The plan of the stage that the run is in."""
        return self.plans[self.stage_number]

    # the loop

    def train(self, steps: int | None = None, *, resume: str | None = None) -> list[dict[str, Any]]:
        """Run the stages from where they are, at most `steps` steps more; the metrics of all steps so far.

        `resume` is `auto`, a run or a checkpoint. Ctrl-C stops after a checkpoint; calling `train` again goes on.
        """
        with self.stop:
            self._begin(resume)
            until = sum(plan.allowed for plan in self.plans)
            until = until if steps is None else min(until, self.step + steps)
            try:
                self._make_up_evaluation()
                while self.step < until and not self.stop:
                    self._go_through(self._open_stage(), until)
            finally:
                self._end()
        return self.metrics

    def _go_through(self, stage: Stage, until: int) -> None:
        while self.stage_step < stage.steps and self.step < until and not self.stop:
            rollouts = self._collect(stage)
            if rollouts is None:
                return
            batch, metrics = self._score(stage, rollouts)
            metrics |= self._update(stage, batch)
            self._publish(stage)
            self._record(stage, batch, metrics)
            self._maybe_checkpoint()

    def _collect(self, stage: Stage) -> list[Rollout] | None:
        """The step's rollouts; None when the run is to stop, with the draws given back."""
        before, timing = stage.sampler.state_dict(), Timing()
        self.phases.start()
        with self.phases("rollout"):
            try:
                rollouts = stage.collect(
                    stage.sampler.next(stage.config.rollout.prompts_per_step), self.stage_step, timing
                )
            except BaseException as error:
                stage.sampler.load_state_dict(before)
                if isinstance(error, Interrupted):
                    return None
                raise
        self._timing, self._whole = timing, False
        return rollouts

    def _score(self, stage: Stage, rollouts: list[Rollout]) -> tuple[Batch, dict[str, Any]]:
        with self.phases("score"):
            batch, metrics = stage.score(rollouts)
            _remember(self.history, rollouts)
        return batch, metrics

    def _update(self, stage: Stage, batch: Batch) -> dict[str, Any]:
        with self.phases("update"):
            objective = stage.objective().at(self.stage_step, stage.steps)
            lr = learning_rate(stage.config.optim, self.stage_step, stage.steps)
            metrics = self.learner.update(batch, objective, stage.config.optim, lr)
            self.version += 1
        return metrics

    def _publish(self, stage: Stage) -> None:
        """Hand the weights to the engine, when the stage samples with it."""
        with self.phases("publish"):
            if stage.samples:
                self.engine.publish(self.version, self.backend.named_weights)

    def _record(self, stage: Stage, batch: Batch, metrics: dict[str, Any]) -> None:
        """The step's line: what was measured, evaluated and how long it took."""
        self.step, self.stage_step, self.batch = self.step + 1, self.stage_step + 1, batch
        metrics |= self._times(metrics)
        oldest = min(
            (int(r.policy_version[r.sampled].min()) for r in batch.rollouts if r.sampled.any()),
            default=self.version - 1,
        )
        metrics |= {
            "step": self.step,
            "run/stage": stage.plan.name,
            "run/epoch": stage.sampler.epoch,
            "policy/version": self.version,
            "policy/staleness_max": self.version - 1 - oldest,
        }
        stage.observe(metrics)
        if self._evaluation_is_due(stage):
            metrics |= self._evaluate_unless_stopped()
        row = record(metrics)
        self.metrics.append(row)
        self.folder.metrics.append(row)
        self.rollout_log.write(self.step, batch)
        for tracker in self.trackers:
            tracker.log(self.step, row)
            tracker.log_rollouts(self.step, sample_rows(batch))
        self.console.step(row, batch)
        self._whole = True
        self._stop_when_hopeless(row)

    def _maybe_checkpoint(self) -> None:
        every = self.config.checkpoint.every
        if every and self.step % every == 0:
            self.save()

    # evaluation

    def evaluate(self, tasks: Any = None) -> dict[str, Any]:
        """Evaluate the policy as it is, on `tasks` or the run's evaluation tasks; results by metric name."""
        stage_config = self.plan.config
        chosen = load_tasks(tasks, split="eval") if tasks is not None else self._evaluation_tasks(stage_config)
        if not chosen:
            raise DataError("there are no tasks to evaluate on: set data.eval or evaluation.data")
        self.backend = self.backend or self._new_backend()
        self.engine.publish(self.version, self.backend.named_weights)
        start = time.perf_counter()
        same = self.verifications[self.stage_number].of(chosen[0]).same_answer
        done = evaluate(chosen, stage_config, self._collect_for_evaluation, same)
        results = {**done.results, "time/evaluate": time.perf_counter() - start}
        row = {
            "step": self.step,
            "stage": self.plan.name,
            **results,
        }
        self.evaluations.append(row)
        if self._begun:
            self.folder.evaluations.append(row)
        self.console.evaluation(self.step, results)
        return results

    def _evaluate_unless_stopped(self) -> dict[str, Any]:
        """The results of an evaluation; none, and a note that it is owed, when the run is to stop before it is done."""
        self._owes_evaluation = True
        try:
            results = self.evaluate()
        except Interrupted:
            return {}
        self._owes_evaluation = False
        return results

    def _make_up_evaluation(self) -> None:
        """Evaluate where a stop kept the run from it, and complete the step's line."""
        if not self._owes_evaluation:
            return
        results = self._evaluate_unless_stopped()
        if results and self.metrics:
            self.metrics[-1] = record({**self.metrics[-1], **results})
            self.folder.metrics.truncate_after(self.step - 1)
            self.folder.metrics.append(self.metrics[-1])

    def _collect_for_evaluation(self, tasks: Sequence[Task], sampling: Sampling, samples: int) -> list[Rollout]:
        draws = [Draw(number, task) for number, task in enumerate(tasks)]
        plan = registry.build("plan", "single_turn")
        return self._gather(
            draws, plan, sampling, samples, self.config.rollout.deadline, Timing(), "evaluation", patient=True
        )

    def _evaluation_tasks(self, config: Config) -> list[Task]:
        tasks = (
            self._load(config.evaluation.data, "eval")
            if config.evaluation.data is not None
            else self._eval_pool(config)
        )
        return tasks[: config.evaluation.limit]

    def _eval_pool(self, config: Config) -> list[Task]:
        given = self.given_eval_tasks if self.given_eval_tasks is not None else config.data.eval
        return self._load(given, "eval", config) if given is not None else []

    def _evaluation_is_due(self, stage: Stage) -> bool:
        asked = stage.config.evaluation
        last = asked.at_end and self.stage_step in (stage.steps, stage.plan.allowed)
        return bool(last or (asked.every and self.step % asked.every == 0)) and bool(
            self._evaluation_tasks(stage.config)
        )

    # stages

    def _check_stages(self) -> None:
        """Open every stage once before training, so that bad tasks and settings are refused before time is spent."""
        for number, plan in enumerate(self.plans):
            stage = self._make_stage(number, plan)
            if stage.left_out:
                self.console.message(f"stage {plan.name}: {stage.left_out} tasks are left out, they are too long")
            if stage.samples:
                self.verifications[number].check(stage.pool)
            self.verifications[number].check(self._evaluation_tasks(plan.config))

    def _make_stage(self, number: int, plan: StagePlan) -> Stage:
        spec = self.given_tasks if self.given_tasks is not None else plan.config.data.train
        if spec is None:
            raise ConfigError(
                "the config names no tasks: set data.train to a file, a folder, a hub name or a registered source"
            )
        template = Template.parse(plan.config.data.template)

        def prompt(task: Task) -> tuple[int, ...]:
            key = (repr(template), repr(task.prompt))
            if key not in self._prompts:
                self._prompts[key] = tuple(render_prompt(task, self.policy.tokenizer, template))
            return self._prompts[key]

        def collect(*arguments: Any) -> list[Rollout]:
            return self._gather(*arguments, prompt=prompt)

        tasks = self._load(spec, "train", plan.config)
        make = registry.find("stage", plan.kind)
        parts = Parts(self.policy, self.history, prompt, collect)
        return make(plan, parts, tasks, seed_of(self.seed, number, "sampler"), **plan.options)

    def _open_stage(self) -> Stage:
        """The stage that the next step is in, opened with its optimizer and reference when it is new."""
        while self.stage_step >= (self.plan.steps or 0):
            self.stage_number, self.stage_step, self.stage = self.stage_number + 1, 0, None
        plan = self.plan
        if self.stage is None:
            self.stage = self._make_stage(self.stage_number, plan)
            self.backend = self._new_backend()
            self.learner = Learner(self.backend, Snapshot(self.policy) if self.stage.keeps_reference else None)
            if self.step == 0 and plan.config.evaluation.at_start and self._evaluation_tasks(plan.config):
                self._evaluate_unless_stopped()
        if self.stage.samples:
            self.engine.publish(self.version, self.backend.named_weights)
        self.console.stage(plan.name, plan.allowed, self.stage_step)
        return self.stage

    def _new_backend(self) -> Backend:
        """A backend with a fresh optimizer, as the stage wants it."""
        options = registry.build("backend", self.config.distributed.backend)
        return options.open(self.policy, self.plan.config.optim.optimizer)

    def _gather(
        self,
        draws: Sequence[Draw],
        plan: Any,
        sampling: Sampling,
        group_size: int,
        deadline: float,
        timing: Timing,
        purpose: str,
        *,
        prompt: Callable[[Task], tuple[int, ...]] | None = None,
        patient: bool = False,
    ) -> list[Rollout]:
        """Run a plan over the draws. Seeds follow a path, so that nothing depends on the order of events (N7)."""
        template = Template.parse(self.plan.config.data.template)
        path = (self.seed, purpose) if patient else (self.seed, self.stage_number, purpose)
        means = Means(
            generate=self.engine.generate,
            verify=self.verifications[self.stage_number].verify,
            prompt=prompt or (lambda task: tuple(render_prompt(task, self.policy.tokenizer, template))),
            seed=lambda *more: seed_of(*path, *more),
            sampling=sampling,
            group_size=group_size,
            history=self.history,
        )
        return self.collector.collect(draws, plan, means, deadline, timing)

    def _load(self, spec: Any, split: str, config: Config | None = None) -> list[Task]:
        """Tasks as written or given, read once."""
        data = (config or self.config).data
        given = spec is self.given_tasks or spec is self.given_eval_tasks
        key = f"given {split} {data.fields!r}" if given else f"{split} {data.fields!r} {spec!r}"
        if key not in self._tasks:
            self._tasks[key] = load_tasks(spec, split=split, fields=data.fields)
        return self._tasks[key][: data.limit] if split == "train" else self._tasks[key]

    # beginning, saving and ending

    def _begin(self, resume: str | None) -> None:
        if self._begun:
            return
        self.rollout_log = RolloutLog(self.folder.path, self.config.logging.rollouts)
        found = self.folder.find(resume) if resume else None
        if found is not None:
            self.load(found)
        else:
            self.folder.begin(again=resume == "auto")
        self._begun = True
        if is_adapter(self.policy.model) and self.config.model.scratch is not None:
            save_base(self.policy.model, self.policy.tokenizer, self.folder.path / "base")
        for tracker in self.trackers:
            tracker.start(self.config.dump(), self.folder.path)
        self.console.start(plan_lines(self.config, self.plans, self.folder.path))
        if found is not None:
            self.console.message(f"resumed from {found}: step {self.step}")

    def save(self) -> Path:
        """Write a checkpoint of the run as it is after the last whole step."""
        stage = self.stage
        if stage is None or self.backend is None:
            raise TrainingError("there is nothing to save before the first step")
        state = {
            "step": self.step,
            "version": self.version,
            "stage_number": self.stage_number,
            "stage_step": self.stage_step,
            "stage": stage.state_dict(),
            "history": self.history.state_dict(),
            "nonfinite": self._nonfinite,
            "owes_evaluation": self._owes_evaluation,
            "config": self.config.dump(),
        }
        tensors = {"random": torch.get_rng_state(), "backend": self.backend.state_dict()}
        if self.learner.reference is not None:
            tensors["reference"] = self.learner.reference.state_dict()
        return checkpoint.save(
            self.folder.checkpoints, self.step, state, tensors, self._save_model, self.config.checkpoint.keep
        )

    def _save_model(self, folder: Path) -> None:
        self.backend.save_model(folder)
        if self.config.checkpoint.merged and is_adapter(self.policy.model):
            self.backend.save_merged(folder.parent / "merged")

    def load(self, path: Path) -> None:
        """Take back the state of a checkpoint."""
        state, tensors = checkpoint.load(path)
        self.folder.go_on(state["config"], state["step"])
        self.step, self.version = state["step"], state["version"]
        self.stage_number, self.stage_step = state["stage_number"], state["stage_step"]
        self._nonfinite, self._owes_evaluation = state["nonfinite"], state["owes_evaluation"]
        self.history.load_state_dict(state["history"])
        self.rollout_log.truncate_after(self.step)
        self.metrics = list(self.folder.metrics.rows())
        self.evaluations = list(self.folder.evaluations.rows())
        self.backend = self._new_backend()
        self.backend.load_state_dict(tensors["backend"])
        self.stage = self._make_stage(self.stage_number, self.plan)
        self.stage.load_state_dict(state["stage"])
        reference = Snapshot(self.policy) if "reference" in tensors else None
        if reference is not None:
            reference.load_state_dict(tensors["reference"])
        self.learner = Learner(self.backend, reference)
        torch.set_rng_state(tensors["random"])

    def _end(self) -> None:
        """After the last step of this call: checkpoint, files, and the console given back. Bounded in time."""
        newest = self.folder.checkpoints / f"step-{self.step}"
        if self.step and self._whole and not newest.exists():
            self.console.message(f"checkpoint: {self.save()}")
        if self.stop:
            self.console.message(f"stopped after step {self.step}; train again or --resume auto to go on", "warning")
        self.console.finish()

    def close(self) -> None:
        """End trackers, workers, engine and threads. The trainer cannot train afterwards."""
        for tracker in self.trackers:
            tracker.finish()
        self.console.finish()
        self.collector.close()
        self.engine.close()
        self.pool.close()

    def __enter__(self) -> GRPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.collector.close()

    def _times(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds by phase; what verification took beyond sampling counts as verification."""
        times = self.phases.finish()
        waited = min(self._timing.verifying, times["time/rollout"])
        times["time/rollout"] -= waited
        times["time/verify"] += waited
        sampled = metrics.get("tokens/sampled")
        return {**times, "time/tokens_per_second": sampled / times["time/step"] if sampled else None}

    def _stop_when_hopeless(self, row: Mapping[str, Any]) -> None:
        skipped = row["skipped/nonfinite"]
        self._nonfinite = self._nonfinite + 1 if skipped else 0
        if skipped:
            self.console.message(
                f"step {self.step}: the loss or gradient was not finite; the update was skipped", "warning"
            )
        if self._nonfinite >= self.config.run.max_nonfinite:
            self.save()
            raise TrainingError(
                f"the loss or gradient was not finite for {self._nonfinite} steps in a row; stopped with a checkpoint. "
                "Lower optim.lr, or look at the rewards and log-probs of the last rollouts"
            )


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    path = getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not path:
        raise ConfigError(
            "the model was given without a tokenizer, and does not say where it came from: pass tokenizer="
        )
    return AutoTokenizer.from_pretrained(path)


def _trackers(config: Config) -> list[Tracker]:
    wandb = config.logging.wandb
    if wandb is False:
        return []
    options = {} if wandb is True else wandb.model_dump()
    return [WandbTracker(**options)]


def _remember(history: History, rollouts: Iterable[Rollout]) -> None:
    """Put the verdicts of each group into the per-prompt history."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.verdict is not None:
            groups.setdefault(rollout.group, []).append(rollout)
    for members in groups.values():
        scores = [r.verdict.score if r.verdict else None for r in members]
        history.record(members[0].task.id, scores, [r.text for r in members])
