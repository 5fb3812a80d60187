"""The column `advantage` of a batch: an estimator, then modifiers, with what they declare that they need.

The contracts are `rlvr.components.Advantage` and `Modifier`. Invariant: no component is known here by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr import registry
from rlvr.components import Advantage, AdvantageComponent
from rlvr.config import Config
from rlvr.core.component import ComponentList
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.policy.columns import add_statistics
from rlvr.records import Batch, Task
from rlvr.rollout.characters import char_ends
from rlvr.stages.grpo.build_objective import build_penalty
from rlvr.stages.grpo.reference_penalty import less_penalty


class Advantages:
    """The estimator and the modifiers that the configuration names. ConfigError where they contradict the rest of it."""

    def __init__(self, config: Config, tasks: Sequence[Task]) -> None:
        algorithm = config.algorithm
        self.config = config
        self.name = algorithm.advantage.name
        estimator: Advantage = registry.build("advantage", algorithm.advantage)
        self._named: list[tuple[str, AdvantageComponent]] = [(self.name, estimator)]
        self._named += [(spec.name, registry.build("modifier", spec)) for spec in algorithm.modifiers]
        self.components = ComponentList(self._named)
        smallest = estimator.smallest_group
        if config.rollout.group_size < smallest:
            raise ConfigError(
                f"rollout.group_size is {config.rollout.group_size}, and the advantage {self.name!r} compares the members of "
                f"a group: set rollout.group_size to {smallest} or more, or choose an advantage that needs no group (group "
                "with baseline and scale none, say)"
            )
        self._penalised = (penalty := build_penalty(algorithm)) is not None and penalty.where == "advantage"
        self.loss = algorithm.loss.name
        self._loss_per_response = registry.build("loss", algorithm.loss).per_response
        self._refuse_tokens_where_one_number_is_needed()
        for _, component in self._named:
            component.check(config, tasks)

    def _refuse_tokens_where_one_number_is_needed(self) -> None:
        by_token = "kl.where: advantage" if self._penalised else None
        for name, component in self._named:
            if by_token is not None and component.per_response:
                raise ConfigError(
                    f"algorithm.modifiers: {name!r} needs one advantage per response, and {by_token!r} before it gives one "
                    f"per token: put {name!r} first or leave one of them out"
                )
            by_token = name if component.per_token else by_token
        if by_token is not None and self._loss_per_response:
            raise ConfigError(self._credit_is_lost(by_token))

    def _credit_is_lost(self, by_token: str) -> str:
        """Say that the loss would make one number of the advantages per token that `by_token` gives."""
        return (
            f"algorithm.loss {self.loss!r} takes one number per response here (ratio geometric or sequence, gmpo, losses of whole "
            f"responses), and {by_token!r} gives an advantage per token, of which only the mean would count: set "
            "algorithm.preset=gspo_token (loss.ratio geometric_token), loss.ratio=token, or an advantage per response"
        )

    def add(self, batch: Batch, policy: Policy, step: int, steps: int) -> None:
        """The column `advantage`, or the token column where a piece gives one array per rollout.

        ConfigError names a piece whose result has another shape, or no number for a decided rollout.
        """
        self._add_what_is_needed(batch, policy)
        (name, estimator), *modifiers = self.components.at(step, steps)
        values = self._checked(estimator(batch), batch, f"algorithm.advantage {name!r}")
        if self._penalised:
            values = less_penalty(values, batch)
        for name, modifier in modifiers:
            values = self._checked(modifier(batch, values), batch, f"algorithm.modifiers: {name!r}")
        if isinstance(values, list):
            if self._loss_per_response:  # a piece that does not declare `per_token`
                raise ConfigError(self._credit_is_lost(" or ".join(name for name, _ in self._named)))
            batch.token_columns["advantage"] = values
        else:
            batch.columns["advantage"] = values

    def _add_what_is_needed(self, batch: Batch, policy: Policy) -> None:
        asked = frozenset().union(*(component.needs for _, component in self._named))
        needs = {
            need for need in asked if f"{need.statistic}/current" not in batch.token_columns
        }  # a reward may have them
        if needs:
            decided = np.isfinite(batch.column("reward"))
            where = [r.sampled & on for r, on in zip(batch.rollouts, decided, strict=True)]
            add_statistics(policy, batch, needs, where, self.config.optim)
        if any(component.reads_characters for _, component in self._named):
            for rollout in batch.rollouts:
                if rollout.char_ends is None and rollout.verdict is not None and rollout.verdict.spans:
                    rollout.char_ends = char_ends(policy.tokenizer, rollout)

    @staticmethod
    def _checked(values: Any, batch: Batch, piece: str) -> np.ndarray | list[np.ndarray]:
        if isinstance(values, list):
            columns = [np.asarray(v, dtype=np.float64) for v in values]
            fits = [v.shape for v in columns] == [(len(r),) for r in batch.rollouts]
        else:
            columns = [np.asarray(values, dtype=np.float64)]
            fits = columns[0].shape == (len(batch),)
        if not fits:
            raise ConfigError(
                f"{piece} returned shapes {[v.shape for v in columns][:4]} for {len(batch)} rollouts: "
                "an array of one number per rollout is needed, or a list of one array per rollout with a number per token"
            )
        if any(not np.isfinite(v).all() for v in columns):
            raise ConfigError(f"{piece} returned a NaN or an infinity: undecided rollouts get 0")
        return columns if isinstance(values, list) else columns[0]
