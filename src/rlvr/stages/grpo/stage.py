"""The grpo stage: groups of sampled responses, verified, scored against each other.

rollouts -> reward columns -> selection -> advantages -> weights per token. Every component comes from the
configuration, and none is known here by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.config.stage_plan import StagePlan
from rlvr.core.schedules import ComponentList, Controller
from rlvr.errors import ConfigError, DataError
from rlvr.losses import Objective
from rlvr.monitor.batch import advantage_metrics, batch_metrics
from rlvr.records import BASELINE, Batch, Origin, Rollout, StopReason, Task
from rlvr.registry import register
from rlvr.rewards import RewardContext, paid, plain_functions, walk
from rlvr.rollout import RolloutBuffer, StepRollouts
from rlvr.rollout.plans import RolloutPlan
from rlvr.selection import mixed_groups
from rlvr.stages.grpo.appended import token_after, with_token
from rlvr.stages.grpo.build_objective import (
    build_objective,
    build_penalty,
    check_advantage_parts,
    check_reads,
    warn_uncorrected,
)
from rlvr.stages.grpo.demonstrations import check_demonstrations, demonstration, with_demonstrations
from rlvr.stages.grpo.kl_scale import check_scale, kl_factors
from rlvr.stages.grpo.monitoring import MonitoringSampler
from rlvr.stages.grpo.recorded_buffer import RecordedBuffer, recording_of
from rlvr.stages.grpo.redraw import add_round, check_redraw, check_terms, draw_of, drop_draws
from rlvr.stages.grpo.scoring import Advantages, Scoring
from rlvr.stages.grpo.splice import check_splice, with_answers
from rlvr.stages.grpo.supervised_steps import check_supervised_steps, supervision
from rlvr.stages.grpo.truncated_sampling import check_truncation
from rlvr.stages.stage_base import Stage, StageContext, token_weights
from rlvr.verifiers.pool.threads import Threads
from rlvr.verifiers.raised_verdicts import Raised


@register("stage", "grpo")
class GRPOStage(Stage):
    """Reinforcement from verified groups."""

    _reported_nothing = False
    """True if the run has reported a step without a response to learn from."""

    def __init__(self, plan: StagePlan, context: StageContext, tasks: Sequence[Task], seed: int) -> None:
        self._check_objective(plan)
        rollout = plan.config.rollout
        self.scoring = Scoring(plan.config)
        self._objective = build_objective(plan, context.shares_weights)
        if context.is_main:
            warn_uncorrected(plan.config, self._objective)
        self.penalty = build_penalty(plan.config.algorithm)
        self._penalised: dict[str, Any] = {}
        self._shows_demonstrations = any(c.loss.shows_demonstrations for c in self._objective.components)
        self._choosing = [c for c in self._objective.components if c.loss.has_weights]
        self._appended = token_after(self._objective, context.policy)
        self.advantages = Advantages(plan.config, tasks)
        check_scale(plan.config, tasks)
        # Not in `check_plan`: whether `correction: auto` is one depends on the engine.
        check_splice(plan.config, self._objective)
        steps = plan.config.algorithm.supervised_steps
        self._supervision = None if steps is None else supervision(steps, seed, tasks)
        self._supervised = False
        """True if the step last collected learns demonstrations alone."""
        # After `_shows_demonstrations`, which the base class reads; before what needs the pool of tasks that fit.
        super().__init__(plan, context, tasks, seed)
        self._step = 0
        kept = list(self.pool)  # tasks that are left out are never scored
        rollout_plan: RolloutPlan = registry.build("plan", rollout.plan)
        same_answer = context.rollout_context.same_answer
        reward_context = RewardContext(
            plan.config,
            kept,
            same_answer,
            tuple(rollout_plan.sources),
            rollout_plan.adds_verdicts,
            context.rollout_context.verification.gives_spans,
        )
        self.scoring.bind(kept, reward_context)
        self.advantages.check_spans(reward_context)
        check_reads(self._objective, plan.config, {*rollout_plan.sources, *(task.source for task in kept)})
        terms = self.scoring.terms
        check_terms(plan.config, [(term.name, term.function) for term in walk(terms)])
        self.raised = Raised(plain_functions(walk(terms)), plain_functions(paid(terms)), context.is_main)
        context.history.keep_answers(rollout_plan.answer_characters)
        rollout_plan.check(self.rollout_context_at(0), self.pool.at(0))

        recorded = recording_of(plan)
        if recorded is not None and self._supervision is not None:
            raise ConfigError(
                "algorithm.supervised_steps draws steps that sample and steps that do not, and the rollouts here are "
                "recorded: set it to null"
            )
        # Recorded rollouts have no policy that could be monitored.
        monitorings = self.scoring.monitorings if recorded is None else []
        self._monitoring: MonitoringSampler | None = None
        if monitorings:
            self._monitoring = MonitoringSampler(
                monitorings, kept, rollout, context.collector, self.rollout_context_at, plan.config.run.seed
            )
        self.buffer: RolloutBuffer | RecordedBuffer
        if recorded is None:
            self.buffer = RolloutBuffer(
                self.sampler,
                context.collector,
                rollout_plan,
                self.rollout_context_at,
                rollout,
                plan.allowed,
                self._has_signal_aside,
            )
        else:
            self.samples = False
            self.verifies = recorded.rescore
            self.buffer = RecordedBuffer(
                recorded, plan, context, self.sampler, self.rollout_context_at(0), self._objective
            )

    @classmethod
    def check_plan(cls, plan: StagePlan) -> None:
        """ConfigError for an objective or a reward that cannot be built, and for sampling that cannot be trained on."""
        cls._check_objective(plan)
        # Made for their errors.
        Scoring(plan.config)
        Advantages(plan.config, tasks=None)

    @classmethod
    def check_read(cls, plan: StagePlan, tasks: Sequence[Task]) -> None:
        """ConfigError for advantages that the configuration or the tasks contradict."""
        Advantages(plan.config, tasks)

    @staticmethod
    def _check_objective(plan: StagePlan) -> None:
        objective = build_objective(plan, shares_weights=False)
        check_advantage_parts(objective, plan.config.algorithm)
        check_supervised_steps(plan.config, objective)
        check_demonstrations(plan.config.algorithm, objective)
        check_redraw(plan.config)
        rollout = plan.config.rollout
        if rollout.dynamic_sampling and rollout.dynamic_sampling.by == "rewards" and rollout.group_size < 2:
            raise ConfigError(
                "rollout.dynamic_sampling replaces groups whose rewards are all the same, and every group of one is: "
                "set rollout.group_size to 2 or more, or rollout.dynamic_sampling to null"
            )
        check_truncation(plan.config, objective)
        if rollout.temperature == 0:
            raise ConfigError("rollout.temperature 0 gives a group of equal responses: set it above 0")

    def collect(self, step: int) -> StepRollouts:
        """Groups of verified responses, after those that rewards monitor the policy by; the demonstrations of the next
        tasks in a step that learns them alone."""
        self._step = step
        self._supervised = self._supervision is not None and self._supervision.drawn(step)
        if self._supervision is not None and self._supervised:
            # Kept for `roll_back`.
            self._before = self.sampler.state_dict()
            taken = self._supervision.take(self.sampler, self.config.rollout.prompts_per_step)
            return StepRollouts([demonstration(task, self.context, key) for key, task in taken], step=step)
        monitored = [] if self._monitoring is None else self._monitoring.collect(step)
        collected = self.buffer.next(step)
        collected.step = step
        collected.monitored = monitored
        return collected

    def collect_more(self, count: int) -> StepRollouts:
        """`count` groups in the place of those that selection dropped."""
        assert isinstance(self.buffer, RolloutBuffer), "recorded rollouts are not drawn anew"
        return self.buffer.more(self._step, count)

    def missing(self, collected: StepRollouts) -> int:
        """With dynamic sampling by selection: score the further round, drop the draws of which selection leaves no
        response, and return the number of draws to be made in their place; else 0."""
        dynamic = self.config.rollout.dynamic_sampling
        if not self.samples or dynamic is None or dynamic.by != "selection":
            return 0
        assert collected.step is not None, "`collect` notes the step"
        self._step = collected.step
        if (further := collected.further) is not None:
            self._scored_all(further)
            add_round(collected, further)
        candidates, _ = self._that_trains(collected, statistics=False)
        chosen = self.scoring.select(candidates, self._step, self.steps, peek=True)
        kept = {draw_of(rollout) for rollout in chosen.rollouts}
        drop_draws(collected, kept)
        drawn = len({draw_of(rollout) for rollout in [*collected.rollouts, *collected.dropped]})
        wanted = self.config.rollout.prompts_per_step
        return max(0, min(wanted - len(kept), wanted * dynamic.attempts - drawn))

    def call_functions(self, collected: StepRollouts) -> None:
        """Value what was collected by the plain functions among the rewards, unless its rewards were recorded."""
        if collected.columns is None:
            self._call_plain([*collected.rollouts, *collected.dropped])
        for _, rollouts in collected.monitored:
            self._call_plain(rollouts)

    def roll_back(self) -> None:
        """The draws of the step last collected, and of those being collected, are the next to be drawn."""
        if self._supervision is not None:
            self._supervision.roll_back()
        if self._supervised:
            # Not the buffer: the step that it took last is trained.
            self.sampler.load_state_dict(self._before)
        else:
            self.buffer.roll_back()

    def draws_state(self) -> dict[str, Any]:
        """The sampler, and what was drawn ahead of training."""
        return self.buffer.state_dict()

    def load_draws_state(self, state: dict[str, Any]) -> None:
        """Go on drawing where the state was taken."""
        self.buffer.load_state_dict(state)

    def has_signal(self, rollouts: list[Rollout]) -> bool:
        """Return True if the rewards of any group among the rollouts of one draw differ. Values its baseline too, so
        that the thread that trains has no function left to call."""
        self._call_plain(rollouts)
        # The draw's baseline rollout is in no group: its reward must not make a group look varied.
        trained = [r for r in rollouts if r.role != BASELINE]
        return len(mixed_groups(self._scored(trained, peek=True))) > 0

    async def _has_signal_aside(self, rollouts: list[Rollout]) -> bool:
        """Call `has_signal` on a thread of its own, because a slow reward function would hold up the loop that
        samples."""
        return await Threads("rlvr-rewards").call(lambda: self.has_signal(rollouts))

    def score(self, collected: StepRollouts) -> tuple[Batch, dict[str, Any]]:
        """Rewards, selection, advantages and weights."""
        if collected.step is not None:
            self._step = collected.step
        if self._supervision is not None:
            # Of the rollouts, since only rank 0 drew the kind of the step.
            self._supervised = all(r.stop is StopReason.GIVEN for r in collected.rollouts)
            if self._supervised:
                return self._score_demonstrations(collected.rollouts), {}
        when = (self._step, self.steps)
        for monitoring, rollouts in collected.monitored:
            policy, history = self.context.policy, self.context.history
            self.scoring.show_monitored(rollouts, monitoring, policy, history, when, self.reference)
        batch, everything = self._that_trains(collected)
        self._sampled = everything.with_own_columns()
        # Draws are taken by rank 0, which alone forgets what was learned.
        if self._supervision is not None and self.context.is_main:
            self._supervision.look(everything)
        metrics = self.raised.look(everything.rollouts)
        if self.config.algorithm.select_after:
            self._add_advantages(batch)
        self.scoring.show_sampled(everything)
        batch = self.scoring.select(batch, self._step, self.steps)
        if not self.config.algorithm.select_after:
            self._add_advantages(batch)
        # bool [B]: undecided rollouts get weight 0 and count in no denominator.
        on = np.isfinite(batch.column("reward"))
        if self.config.algorithm.mask_truncated:
            on &= ~np.asarray([r.stop.truncated for r in batch.rollouts], dtype=bool)
        batch.token_columns["weight/policy"] = token_weights(batch.rollouts, Origin.POLICY, on)
        # Before rollouts and tokens are appended that nobody sampled: metrics are of what the policy did.
        self._trained = batch.with_own_columns()
        metrics |= self._penalised
        if self.config.algorithm.splice is not None:
            batch = with_answers(batch, self.config.algorithm.splice, self.context.policy)
        if self._shows_demonstrations and self._supervision is None:
            drawn = collected.rollouts if self.config.algorithm.demonstrations == "sampled" else None
            batch = with_demonstrations(batch, self.context, drawn)
        if self._appended is not None:
            batch = with_token(batch, self._appended, self.context.policy.context)
        self._add_columns_of_terms(batch)
        return batch, metrics

    def _add_columns_of_terms(self, batch: Batch) -> None:
        """Factors and weights that terms of the objective choose: last, when every rollout and token is there."""
        if any(c.by_token for c in self._objective.components):
            batch.token_columns["factor/kl"] = self._kl_factors(batch) or []
        for component in self._choosing:
            batch.token_columns[f"weight/{component.weights}"] = component.loss.weights(batch)

    def _score_demonstrations(self, rollouts: list[Rollout]) -> Batch:
        """The batch of a step that learns demonstrations alone: no term but theirs has a token."""
        batch = Batch(rollouts)
        nothing = np.zeros(len(batch), dtype=bool)
        batch.token_columns["weight/policy"] = token_weights(rollouts, Origin.POLICY, nothing)
        self._trained = batch.with_own_columns()
        batch.columns["reward"] = np.full(len(batch), np.nan)
        # Nothing was sampled that an advantage is of; a loss that reads its parts finds them all the same.
        batch.columns |= {name: np.zeros(len(batch)) for name in self.advantages.makes}
        self._add_columns_of_terms(batch)
        return batch

    def metrics_of_scoring(self) -> dict[str, Any]:
        """Metrics of all that was sampled, and of the advantages of what trains."""
        if self._supervised:
            return batch_metrics(self._trained)
        return batch_metrics(self._sampled) | advantage_metrics(self._trained)

    def _that_trains(self, collected: StepRollouts, statistics: bool = True) -> tuple[Batch, Batch]:
        """(what trains unless selection drops it, all that was sampled), without baselines, with their rewards;
        `statistics` as in `_scored_all`."""
        # The sampled rollouts first, then those that dynamic sampling dropped.
        everything, compared = self._scored_all(collected, statistics)
        trained = sum(r.role != BASELINE for r in collected.rollouts)
        if trained < len(everything):
            batch = everything.select(np.arange(trained))
        else:
            batch = everything.with_own_columns()
        if len(compared):
            # The reward of the draw's baseline rollout; NaN where there is none.
            of = dict(zip((r.group for r in compared.rollouts), compared.column("reward").tolist(), strict=True))
            batch.columns["baseline"] = np.asarray([of.get(r.group, np.nan) for r in batch.rollouts], dtype=np.float64)
        return batch, everything

    def _scored_all(self, collected: StepRollouts, statistics: bool = True) -> tuple[Batch, Batch]:
        """(all that was sampled, what it is compared with) with their reward columns, which `collected` keeps; of
        rewards that are known already, the statistics that advantages read where `statistics` is set."""
        everyone = [*collected.rollouts, *collected.dropped]
        recorded = collected.columns
        sampled = np.asarray([r.role != BASELINE for r in everyone], dtype=bool)

        def scored(on: np.ndarray, peek: bool) -> Batch:
            rollouts = [everyone[i] for i in np.flatnonzero(on)]
            if recorded is None:
                return self._scored(rollouts, peek)
            batch = Batch(rollouts, {name: values[on] for name, values in recorded.items()})
            if statistics:
                self.scoring.add_shared_statistics(batch, self.context.policy, self.advantages.needs)
            return batch

        everything = scored(sampled, peek=False)
        if sampled.all():
            compared = Batch([])
        else:
            compared = scored(~sampled, peek=True)
        if recorded is None:
            collected.columns = {
                name: np.full(len(everyone), np.nan) for name in (everything.columns | compared.columns)
            }
            for on, batch in ((sampled, everything), (~sampled, compared)):
                for name, values in batch.columns.items():
                    collected.columns[name][on] = values
        return everything, compared

    def _call_plain(self, rollouts: Sequence[Rollout]) -> None:
        """As `_scored_all` shows rollouts to the functions: baselines apart from the groups that are compared with
        them."""
        # The same batches as `_scored_all` makes: a function of a group sees the same rollouts both times.
        for of_baseline in (False, True):
            self.scoring.call_plain([r for r in rollouts if (r.role == BASELINE) == of_baseline])

    def _scored(self, rollouts: list[Rollout], peek: bool = False) -> Batch:
        when = (self._step, self.steps)
        return self.scoring.score(
            rollouts, self.context.policy, self.context.history, when, peek=peek, reference=self.reference
        )

    def _add_advantages(self, batch: Batch) -> None:
        if self.penalty is not None:
            assert self.reference is not None, "the trainer keeps the reference that a stage asks for"
            when = (self._step, self.steps)
            optim = self.config.optim
            factors = self._kl_factors(batch)
            self._penalised = self.penalty.add(batch, self.context.policy, self.reference, when, optim, factors)
        self.advantages.add(batch, self.context.policy, self._step, self.steps)

    def _kl_factors(self, batch: Batch) -> list[np.ndarray] | None:
        kl = self.config.algorithm.kl
        if kl is None or kl.scale is None:
            return None
        return kl_factors(batch, kl.scale, self.context.policy.tokenizer)

    def fewer_updates(self, row: Mapping[str, Any]) -> str | None:
        """Say, once in a stage, that there was no response to learn from; else as the base class."""
        if len(self._trained) or row["update/steps"]:
            return super().fewer_updates(row)
        if self._reported_nothing:
            return None
        self._reported_nothing = True
        if len(self._sampled):
            why = f"algorithm.select left none of the {len(self._sampled)} responses"
        else:
            why = "rollout.plan sampled no group, as where its probe finds every task solved"
        return f"step {row['step']}: nothing was learned, since {why}; the run goes on, later ones without a warning"

    def controllers(self) -> Iterator[Controller]:
        """Those of the objective, of the advantage and its modifiers, then of rewards and selection."""
        yield from super().controllers()
        for components in self._further_components():
            yield from components.controllers()

    def scheduled(self, step: int) -> dict[str, float]:
        """Those of the objective, of rewards and selection, and of the advantage and its modifiers by the component's
        name."""
        moving = super().scheduled(step)
        for components in self._further_components():
            moving |= components.scheduled(step, self.steps)
        return moving

    def _further_components(self) -> list[ComponentList]:
        """Components beside those of the objective, in the order in which a checkpoint saves their controllers."""
        penalty = [] if self.penalty is None else [("kl", self.penalty)]
        return [ComponentList(penalty), self.advantages.components, self.scoring.components]

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Let controllers and adaptive components move by what the step measured."""
        super().observe(metrics)
        if self._supervision is not None and self._supervised:
            self._supervision.observe(self._step, metrics)
        self.advantages.components.observe(metrics)
        self.scoring.components.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "advantages": self.advantages.components.state_dict(),
            "scoring": self.scoring.components.state_dict(),
            "supervision": None if self._supervision is None else self._supervision.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.advantages.components.load_state_dict(state["advantages"])
        self.scoring.components.load_state_dict(state["scoring"])
        # Checkpoints of earlier versions lack the key.
        if self._supervision is not None and state.get("supervision") is not None:
            self._supervision.load_state_dict(state["supervision"])

    @property
    def most_groups(self) -> int | None:
        """One for each prompt where the plan is known to make no more, and nothing was recorded."""
        plan: RolloutPlan = registry.build("plan", self.config.rollout.plan)
        if plan.one_group and recording_of(self.plan) is None:
            return super().most_groups
        return None

    @property
    def keeps_reference(self) -> bool:
        """Return True if the loss, a penalty or a term of the reward compares with the reference."""
        return self._objective.needs_reference or self.penalty is not None or self.scoring.needs_reference

    def check_tasks(self) -> None:
        """DataError when demonstrations are to be learned from and no task has one; in steps of their own, or where
        answers are learned, when one task has none."""
        bare = [task.named for task in self.pool if task.answer is None or not str(task.answer)]
        if self.config.algorithm.splice is not None and bare:
            raise DataError(
                f"stage {self.plan.name!r}: algorithm.splice learns the tasks' answers, and {len(bare)} of "
                f"{len(self.pool)} tasks have none, the first is {bare[0]}"
            )
        undemonstrated = [task.named for task in self.pool if not task.demonstration]
        if self.config.algorithm.supervised_steps is not None and undemonstrated:
            raise DataError(
                f"stage {self.plan.name!r}: algorithm.supervised_steps learns the tasks' demonstrations, and "
                f"{len(undemonstrated)} of {len(self.pool)} tasks have none, the first is {undemonstrated[0]}"
            )
        if self._shows_demonstrations and not any(task.demonstration for task in self.pool):
            raise DataError(
                f"stage {self.plan.name!r}: algorithm.auxiliary learns from demonstrations, and no task has one: give "
                "the tasks the field `demonstration`, or let the term learn `on: right` responses"
            )

    def objective(self) -> Objective:
        """The policy loss with the KL and entropy terms that the algorithm asks for."""
        return self._objective
