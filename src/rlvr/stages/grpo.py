"""The grpo stage: groups of sampled responses, verified, scored against each other.

rollouts -> reward columns -> selection -> advantages -> weights per token; every piece comes from the configuration, and
none is known here by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.losses import Component, EntropyBonus, KLPenalty, Objective
from rlvr.monitor.batch import advantage_metrics, batch_metrics
from rlvr.records import BASELINE, Batch, Origin, Rollout, Task
from rlvr.registry import register
from rlvr.rewards import build_terms, score
from rlvr.rollout import Collected, Supply
from rlvr.schedules import Controller, controllers, moving_options
from rlvr.selection import mixed_groups
from rlvr.stage_plan import StagePlan
from rlvr.stages.advantages import Advantages
from rlvr.stages.base import Parts, Stage, sampling_of, token_weights


@register("stage", "grpo")
class GRPOStage(Stage):
    """Reinforcement from verified groups."""

    def __init__(self, plan: StagePlan, parts: Parts, tasks: Sequence[Task], seed: int) -> None:
        algorithm, rollout = plan.config.algorithm, plan.config.rollout
        self.selectors = [registry.build("selector", spec) for spec in algorithm.select]
        self.terms = build_terms(plan.config.rewards)
        self._objective = _objective(plan, parts.shares_weights)
        self.advantages = Advantages(plan.config, tasks)
        if rollout.refill and rollout.group_size < 2:
            raise ConfigError(
                "rollout.refill replaces groups whose rewards are all the same, and every group of one is: set "
                "rollout.group_size to 2 or more, or rollout.refill to null"
            )
        for name in ("top_p", "top_k", "min_p"):
            neutral = type(rollout).model_fields[name].default
            if getattr(rollout, name) != neutral:
                raise ConfigError(
                    f"rollout.{name}={getattr(rollout, name)} cannot be trained on: the policy's log-probs are those of the whole "
                    f"distribution, not of a truncated one. Set it to {neutral}; evaluation.{name} is free"
                )
        if rollout.temperature == 0:
            raise ConfigError("rollout.temperature 0 gives a group of equal responses: set it above 0")
        super().__init__(plan, parts, tasks, seed)
        self._step = 0
        asked = registry.build("plan", rollout.plan)
        if hasattr(asked, "check"):
            asked.check(parts.means(sampling_of(self, 0)), self.pool.at(0))
        self.supply = Supply(
            self.sampler,
            parts.collector,
            asked,
            lambda step: parts.means(sampling_of(self, step)),
            rollout,
            plan.allowed,
            self.teaches,
        )

    def collect(self, step: int) -> Collected:
        """Groups of verified responses."""
        self._step = step
        return self.supply.next(step)

    def give_back(self) -> None:
        """The draws of the step last collected, and of those being collected, are the next to be drawn."""
        self.supply.give_back()

    def draws_state(self) -> dict[str, Any]:
        """The sampler, and what was drawn ahead of training."""
        return self.supply.state_dict()

    def load_draws_state(self, state: dict[str, Any]) -> None:
        """Go on drawing where the state was taken."""
        self.supply.load_state_dict(state)

    def teaches(self, rollouts: list[Rollout]) -> bool:
        """Whether the rewards of any group among the rollouts of one draw differ."""
        trained = [r.as_trained() for r in rollouts if r.role != BASELINE]
        return len(mixed_groups(score(Batch(trained), self.terms))) > 0

    def score(self, collected: Collected) -> tuple[Batch, dict[str, Any]]:
        """Rewards, selection, advantages and weights; the metrics are of all that was sampled."""
        trained = [r.as_trained() for r in collected.rollouts if r.role != BASELINE]
        dropped = [r.as_trained() for r in collected.dropped if r.role != BASELINE]
        everything = score(Batch([*trained, *dropped]), self.terms)
        metrics = batch_metrics(everything)
        batch = everything.select(np.arange(len(trained))) if dropped else everything
        self._add_baselines(batch, [r for r in collected.rollouts if r.role == BASELINE])
        if self.config.algorithm.select_after:
            self._add_advantages(batch)
        for select in self.selectors:
            kept = np.asarray(select(batch))
            batch = batch.select(np.flatnonzero(kept) if kept.dtype == bool else kept)
        if not self.config.algorithm.select_after:
            self._add_advantages(batch)
        on = np.isfinite(batch.column("reward"))
        if self.config.algorithm.mask_truncated:
            on &= ~np.asarray([r.stop.truncated for r in batch.rollouts], dtype=bool)
        batch.token_columns["weight/policy"] = token_weights(batch.rollouts, Origin.POLICY, on)
        return batch, metrics | advantage_metrics(batch)

    def _add_baselines(self, batch: Batch, compared: list[Rollout]) -> None:
        """The columns `baseline`, the reward of the draw's baseline rollout where there are such, and `history/mean`, the
        mean score of the task's earlier draws; NaN where there is none."""
        history = [self.parts.history[r.task.id].pass_rate for r in batch.rollouts]
        batch.columns["history/mean"] = np.asarray([np.nan if h is None else h for h in history], dtype=np.float64)
        if compared:
            rewards = score(Batch([r.as_trained() for r in compared]), self.terms).column("reward")
            of = dict(zip((r.group for r in compared), rewards.tolist(), strict=True))
            batch.columns["baseline"] = np.asarray([of.get(r.group, np.nan) for r in batch.rollouts], dtype=np.float64)

    def _add_advantages(self, batch: Batch) -> None:
        self.advantages.add(batch, self.parts.policy, self._step, self.steps)

    def controllers(self) -> Iterator[Controller]:
        """Those of the objective, then those of the advantage and its modifiers."""
        yield from super().controllers()
        yield from controllers(*self.advantages.pieces)

    def scheduled(self, step: int) -> dict[str, float]:
        """Those of the objective, and of the advantage and its modifiers by the piece's name."""
        moving = super().scheduled(step)
        for name, piece in zip(self.advantages.names, self.advantages.pieces, strict=True):
            moving |= moving_options(piece, f"schedule/{name}", step, self.steps)
        return moving

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Let controllers and pieces with a memory move by what the step measured."""
        super().observe(metrics)
        self.advantages.observe(metrics)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"advantages": self.advantages.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.advantages.load_state_dict(state["advantages"])

    def objective(self) -> Objective:
        """The policy loss with the KL and entropy terms that the algorithm asks for."""
        return self._objective


def _objective(plan: StagePlan, shares_weights: bool) -> Objective:
    algorithm = plan.config.algorithm
    loss = registry.build("loss", algorithm.loss)
    missing = [name for name in ("needs", "average") if not hasattr(loss, name)]
    if missing:
        raise ConfigError(
            f"algorithm.loss {registry.split(algorithm.loss)[0]!r} does not say its `{missing[0]}`: a loss is a class with "
            "`needs` (what it reads of a forward pass) and `average` (what it averages over)"
        )
    skips = getattr(loss, "zero_without_advantage", False)
    components = [Component("policy", loss, "policy", zero_without_advantage=skips, corrected=True)]
    if algorithm.kl is not None and algorithm.kl.coef != 0.0:
        estimator = registry.build("kl", algorithm.kl.estimator)
        components.append(Component("kl", KLPenalty(estimator, loss.average), "policy", algorithm.kl.coef))
    if algorithm.entropy != 0.0:
        components.append(Component("entropy", EntropyBonus(loss.average), "policy", algorithm.entropy))
    constant = getattr(loss, "constant", None) or plan.config.rollout.max_new_tokens
    correction = algorithm.correction
    if correction == "auto":
        correction = None if shares_weights else "truncate"
    weigh = None if correction is None else registry.build("correction", correction)
    return Objective(tuple(components), float(constant), weigh, algorithm.decoupled)
