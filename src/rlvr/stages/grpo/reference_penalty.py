"""The divergence from the reference as part of the reward: what a response earns less for having drifted.

It is measured before the update, once per step: a pass of the policy and one of the reference. With `where: reward` its
sum over a response is taken from the response's reward before the baseline (RLOO, Ahmadian et al. 2024); with
`where: advantage` each token's advantage loses the sum from that token on, after the estimator and before the
modifiers, whose `whiten` then normalises both (PPO's per-token penalty, and REINFORCE++, Hu 2025, with discount 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.needs import Need
from rlvr.core.schedules import Scalar, scalar_value
from rlvr.losses import Divergence
from rlvr.policy import Policy, Snapshot
from rlvr.policy.statistics import add_statistics
from rlvr.records import Batch


@dataclass(frozen=True)
class ReferencePenalty:
    """coef x the divergence from the reference, taken from rewards or from advantages."""

    divergence: Divergence
    coef: Scalar
    where: Literal["reward", "advantage"]

    def add(
        self,
        batch: Batch,
        policy: Policy,
        reference: Snapshot,
        when: tuple[int, int],
        optim: OptimConfig,
        factors: Sequence[np.ndarray] | None = None,
    ) -> dict[str, Any]:
        """The token column `penalty`, 0 at tokens that were not sampled; with `where: reward` its sums are taken from
        the column `reward`. `when` is (step, steps) of the stage, `factors` multiply the coefficient at each token.
        Metrics: `kl/ref` and `reward/kl`."""
        # bool [T_b] each
        where = [r.sampled for r in batch.rollouts]
        add_statistics(policy, batch, [Need("logprobs")], where, optim)
        now = batch.token_columns["logprobs/current"]
        # The same model object computes with the snapshot's weights and writes the same column, so the policy's is kept
        # first.
        with reference.in_place():
            add_statistics(policy, batch, [Need("logprobs")], where, optim)
        then = batch.token_columns["logprobs/current"]
        batch.token_columns |= {"logprobs/current": now, "logprobs/reference": then}

        divergence = [np.zeros(len(r)) for r in batch.rollouts]
        # In float64: the sum over a long response is subtracted from a reward.
        for values, on, current, reference_logprobs in zip(divergence, where, now, then, strict=True):
            values[on] = self.divergence(
                torch.from_numpy(current[on]).double(), torch.from_numpy(reference_logprobs[on]).double()
            ).numpy()
        coef = scalar_value(self.coef, *when)
        scales: Sequence[Any] = [1.0] * len(batch) if factors is None else factors
        batch.token_columns["penalty"] = [coef * f * values for f, values in zip(scales, divergence, strict=True)]
        sums = np.asarray([values.sum() for values in batch.token_columns["penalty"]])
        if self.where == "reward":
            # r - coef sum_t f_t KL_t, [B], with f_t from `factors` (1 without them); NaN stays NaN.
            batch.columns["reward"] = batch.column("reward") - sums
        tokens = sum(int(on.sum()) for on in where)
        return {
            "kl/ref": float(sum(values.sum() for values in divergence)) / tokens if tokens else None,
            "reward/kl": -float(sums.mean()) if len(sums) else None,
        }


def less_penalty(values: np.ndarray | list[np.ndarray], batch: Batch) -> list[np.ndarray]:
    """Advantages per token, each less the penalty from its token to the end of the response."""
    if isinstance(values, list):
        spread = values
    else:
        spread = [np.full(len(r), v) for r, v in zip(batch.rollouts, values, strict=True)]
    # sum over t' >= t of the penalty, [T_b]: a cumulative sum from the right.
    to_go = [np.cumsum(penalty[::-1])[::-1] for penalty in batch.tokens("penalty")]
    return [
        # Undecided responses keep 0: a penalty alone would train them.
        np.where(r.sampled & bool(np.isfinite(reward)), v - lost, v)
        for r, reward, v, lost in zip(batch.rollouts, batch.column("reward"), spread, to_go, strict=True)
    ]
