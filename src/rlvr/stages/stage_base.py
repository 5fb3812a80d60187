"""The base of stages: where rollouts come from, how they are scored, and what is optimised.

The trainer runs every kind of stage through the same loop. A stage owns its tasks and sampler; everything that lives
longer than a stage (policy, engine, history) is handed in as `StageContext`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.config import OptimConfig
from rlvr.config.stage_plan import StagePlan
from rlvr.core.component import CONTRACTS, Component
from rlvr.core.schedules import ComponentList, Controller, Schedule, StepSchedule, scalar_value
from rlvr.data import History, Sampler, TaskPool
from rlvr.errors import ConfigError, DataError
from rlvr.losses import Objective
from rlvr.policy import Policy, Snapshot, check_packing
from rlvr.records import Batch, Rollout, Task
from rlvr.rollout import Collector, RolloutContext, Sampling, StepRollouts


@dataclass
class StageContext:
    """Parts of the run that a stage works with."""

    policy: Policy
    history: History
    prompt: Callable[[Task], tuple[int, ...]]
    """The token ids of a task's prompt under the stage's template."""
    lengths: Callable[..., tuple[np.ndarray, np.ndarray]]
    """`lengths(tasks, demonstrations=False)`: tokens of each prompt and, if asked, each demonstration, int32 [N]
    each."""
    collector: Collector
    rollout_context: RolloutContext
    """The context of a plan; `Stage.rollout_context_at` gives it the sampling of a step."""
    longest_sequence: int
    """Longest sequence in tokens, prompt and response together, that can be sampled and trained."""
    shares_weights: bool
    """True if the engine computes with the trainer's own weights."""
    is_main: bool = True
    """True if this is the rank that warns."""


class Stage(Component):
    """One stage, opened for a run."""

    injected = ("plan", "context", "tasks", "seed")
    """Parameters of the constructor that the trainer gives, in the order of `__init__`; the others are the kind's
    options."""
    reference: Snapshot | None = None
    """The policy at the start of the stage, set by the trainer where `keeps_reference` asks for it."""
    samples = True
    """True if its rollouts come from the engine, which then needs the newest weights."""
    verifies = True
    """True if its rollouts are verified; every task must then be one that can be verified."""
    _shows_demonstrations = False
    """True if tasks' demonstrations are learned from, so that they have to fit after the prompt."""
    _reported_fewer_updates = False
    """True if the run has reported that a step had fewer groups than optimizer steps."""

    def __init__(self, plan: StagePlan, context: StageContext, tasks: Sequence[Task], seed: int) -> None:
        self.plan = plan
        self.config = plan.config
        self.context = context
        # What can be refused is refused here, before the first rollout is paid for.
        check_packing(context.policy, self.config.optim)
        self._check_updates()
        # int32 [tasks] each; the ranks share the work of encoding.
        lengths, shown = context.lengths(tasks, demonstrations=self._shows_demonstrations)
        sizes = zip(tasks, lengths.tolist(), shown.tolist(), strict=True)
        problems = {
            task.id: f"{task.named}: {problem}"
            for task, *size in sizes
            if (problem := self.too_long(*size)) is not None
        }
        if problems and not self.config.data.skip_long_prompts:
            raise DataError(
                f"{next(iter(problems.values()))} ({len(problems)} of {len(tasks)} tasks are like that): shorten "
                "them, or set data.skip_long_prompts=true to leave them out"
            )
        self.left_out = len(problems)
        fits = np.asarray([task.id not in problems for task in tasks], dtype=bool)
        kept = [task for task, fit in zip(tasks, fits, strict=True) if fit]
        if not kept:
            raise DataError(
                f"stage {plan.name!r}: all {len(tasks)} tasks are too long: {next(iter(problems.values()))}"
            )
        self.longest_response = context.longest_sequence - int(lengths[fits].min())
        """Tokens that the context leaves for a response to the shortest prompt."""
        wanted = self.config.rollout.max_new_tokens
        self.cut_responses = int((lengths[fits] + wanted > context.longest_sequence).sum()) if self.samples else 0
        """Number of tasks to whose prompt the context leaves fewer tokens than `rollout.max_new_tokens`."""
        self.pool = TaskPool(kept, self.config.checkpoint.accept_changed_data)
        # Of the tasks that fit only: a sampler numbers them, and skipping later would change its epochs.
        self.sampler: Sampler = registry.build("sampler", self.config.data.sampler).bind(
            self.pool, seed=seed, history=context.history
        )
        self.check_tasks()

    @classmethod
    def check_plan(cls, plan: StagePlan) -> None:
        """ConfigError for a plan that the stage refuses whatever the tasks and the model are: a dry run asks too."""

    @classmethod
    def check_read(cls, plan: StagePlan, tasks: Sequence[Task]) -> None:
        """ConfigError or DataError for tasks that the stage refuses whatever the model is: asked before one is loaded,
        and by a dry run of the tasks that it reads."""

    @property
    def steps(self) -> int:
        """Steps of the stage."""
        return int(self.plan.steps or 0)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step of the stage, counted from 0."""
        return learning_rate(self.config.optim, step, self.steps)

    def rollout_context_at(self, step: int) -> RolloutContext:
        """Return the context of a plan in a step of the stage, counted from 0."""
        rollout = self.config.rollout
        sampling = Sampling(
            max_new_tokens=rollout.max_new_tokens,
            temperature=scalar_value(rollout.temperature, step, self.steps),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            ignore_eos=rollout.ignore_eos,
        )
        return dataclasses.replace(self.context.rollout_context, sampling=sampling)

    @abstractmethod
    def collect(self, step: int) -> StepRollouts:
        """The rollouts of `step` of the stage. Raises CollectionInterruptedError when the run is to stop."""

    def collect_more(self, count: int) -> StepRollouts:
        """`count` further groups for the step last collected, which `missing` asked for; raises as `collect`."""
        raise NotImplementedError(f"a stage of the kind {self.plan.kind!r} draws nothing anew")

    def missing(self, collected: StepRollouts) -> int:
        """Groups that are to be drawn anew, 0 for none; `collected` takes in its further round."""
        return 0

    @abstractmethod
    def roll_back(self) -> None:
        """Take the draws of the step last collected for not trained, and end what is being collected."""

    def call_functions(self, collected: StepRollouts) -> None:
        """Call the user's functions of one rollout or group for what was collected. On rank 0 alone, since they may be
        random or paid for; the other ranks get the values with the rollouts."""

    @abstractmethod
    def score(self, collected: StepRollouts) -> tuple[Batch, dict[str, Any]]:
        """The batch that trains, with its columns, and metrics that scoring gave."""

    def metrics_of_scoring(self) -> dict[str, Any]:
        """Metrics of what was last scored. They are asked for after the update, which needs none of them."""
        return {}

    @abstractmethod
    def objective(self) -> Objective:
        """Return the objective, with schedules still in it."""

    @property
    def keeps_reference(self) -> bool:
        """Return True if a component of the objective asks for the reference."""
        return self.objective().needs_reference

    def too_long(self, length: int, shown: int) -> str | None:
        """Why a task does not fit, whose prompt has `length` tokens and whose demonstration `shown`; None when it fits.

        The prompt must be there and leave room for a response, and the demonstration must fit after it.
        """
        if self.samples:
            context = self.context.longest_sequence
        else:
            context = self.context.policy.context
        # One token at least must be left for the response.
        limit = min(self.config.data.max_prompt_tokens or context, context - 1)
        if not 0 < length <= limit:
            problem = f"its prompt has {length} tokens, and 1 to {limit} are possible"
            if limit == context - 1:
                problem += f", in a context of {context} (the smaller one of the model's and the engine's)"
            return problem
        # The model's context and not the engine's: demonstrations are trained and never sampled.
        if length + shown > self.context.policy.context:
            policy_context = self.context.policy.context
            return f"its prompt and demonstration have {length + shown} tokens, the model's context is {policy_context}"
        return None

    @property
    def reference_follows(self) -> bool:
        """Return True if the reference is a moving average of the policy."""
        renewal = self.objective().renewal
        return renewal is not None and renewal.mix < 1

    @property
    def most_groups(self) -> int | None:
        """Most groups that a step can have; None where the configuration does not say."""
        return self.config.rollout.prompts_per_step

    def _check_updates(self) -> None:
        """ConfigError where a step can never have a group for each of its optimizer steps."""
        updates = self.config.optim.updates_per_batch
        groups = self.most_groups
        if groups is not None and updates > groups:
            raise ConfigError(
                f"stage {self.plan.name!r}: optim.updates_per_batch is {updates}, and a batch is cut by whole groups, "
                f"of which a step has at most {groups} (rollout.prompts_per_step): set updates_per_batch to {groups} "
                "or less"
            )

    def fewer_updates(self, row: Mapping[str, Any]) -> str | None:
        """Say, once in a stage, that a step had too few groups for its optimizer steps; `row`: its metrics."""
        optim = self.config.optim
        planned = optim.updates_per_batch * optim.epochs_per_batch
        # A step that was skipped for a loss that is not finite has fewer updates too, and another warning.
        fewer = optim.updates_per_batch > 1 and row["update/steps"] < planned and not row["skipped/nonfinite"]
        if self._reported_fewer_updates or not fewer:
            return None
        self._reported_fewer_updates = True
        return (
            f"step {row['step']}: {row['update/steps']} of {planned} optimizer steps were taken: a batch is cut by "
            "whole groups, and this one has fewer than optim.updates_per_batch; the metric update/steps counts them "
            "in each step"
        )

    def check_tasks(self) -> None:
        """DataError when a task lacks something that this kind of stage needs; by default nothing is."""
        return

    def controllers(self) -> Iterator[Controller]:
        """The controllers among the scalars of the stage, in a fixed order."""
        # Checkpoints save controllers by their position in this order.
        yield from self._objective_components().controllers()
        if isinstance(self.config.rollout.temperature, Controller):
            yield self.config.rollout.temperature
        yield from self._selectors().controllers()

    def scheduled(self, step: int) -> dict[str, float]:
        """The values at `step` of the scalars that are not constants, as `schedule/<component>.<option>`."""
        temperature = self.config.rollout.temperature
        moving: dict[str, float] = {}
        if isinstance(temperature, (Schedule, StepSchedule, Controller)):
            moving["schedule/temperature"] = scalar_value(temperature, step, self.steps)
        moving |= self._objective_components().scheduled(step, self.steps)
        return moving | self._selectors().scheduled(step, self.steps)

    def _objective_components(self) -> ComponentList:
        """The terms of the objective with their coefficients, then their losses."""
        terms = self.objective().components
        return ComponentList([*((term.name, term) for term in terms), *((term.name, term.loss) for term in terms)])

    def _selectors(self) -> ComponentList:
        """The selectors of tokens, each once: several terms may share one."""
        selectors = {id(s): (type(s).__name__, s) for term in self.objective().components for s in term.keep}
        return ComponentList(selectors.values())

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Let the controllers move by what the step measured."""
        for controller in self.controllers():
            controller.observe(metrics)

    def draws_state(self) -> dict[str, Any]:
        """Return the state of the sampler of draws."""
        return self.sampler.state_dict()

    def load_draws_state(self, state: dict[str, Any]) -> None:
        """Go on drawing where the state was taken."""
        self.sampler.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {
            "pool": self.pool.state_dict(),
            "draws": self.draws_state(),
            "controllers": [c.state_dict() for c in self.controllers()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pool.load_state_dict(state["pool"])
        # The fingerprint differs where the tasks do, which `checkpoint.accept_changed_data` allows.
        same = state["pool"]["fingerprint"] == self.pool.fingerprint
        self.load_draws_state(state["draws"] if same else _on_other_tasks(state["draws"], self.pool))
        for controller, saved in zip(self.controllers(), state["controllers"], strict=True):
            controller.load_state_dict(saved)


CONTRACTS["stage"] = (Stage,)


def _on_other_tasks(draws: Mapping[str, Any], pool: TaskPool) -> dict[str, Any]:
    """The state of drawing, moved to the next epoch of a pool of other tasks; requeued draws of tasks that are gone are
    dropped."""
    sampler = draws.get("sampler", draws)
    # A position in a permutation of other tasks means nothing; the next epoch's seed gives a fresh one.
    moved = {**sampler, "epoch": sampler["epoch"] + 1, "position": 0, "size": len(pool)}
    if "sampler" not in draws:
        return moved
    return {**draws, "sampler": moved, "owed": [owed for owed in draws["owed"] if owed[1] in pool]}


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of `step` (from 0) of `steps`: linear warm-up, then the schedule down to `min_lr`."""
    if step < optim.warmup_steps:
        # step + 1: the first step trains, and the last one of the warm-up has the full rate.
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    # Share of the steps after the warm-up, 0 to 1.
    done = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    if optim.schedule == "linear":
        remaining = 1 - done
    else:
        # Cosine from 1 to 0 (Loshchilov and Hutter 2017, without restarts).
        remaining = (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr + (optim.lr - optim.min_lr) * remaining


def token_weights(rollouts: Sequence[Rollout], origin: int, on: np.ndarray) -> list[np.ndarray]:
    """1 for the tokens of an origin in the rollouts that are `on` (bool [B]), else 0; float32 [T_b] each."""
    return [((r.origin == origin) & keep).astype(np.float32) for r, keep in zip(rollouts, on, strict=True)]
