"""RL-PLUS: learning from external answers by multiple importance sampling and an exploration-based advantage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.components import Loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.records import Batch, Origin
from rlvr.registry import register


@register("auxiliary", "external_policy")
@dataclass(frozen=True)
class ExternalPolicy(Loss):
    """-rho (1 - p) ^ power A at the tokens of the tasks' demonstrations, p = pi(token) as a constant in the factor.

    The external half of RL-PLUS (Dong et al. 2025, arXiv 2508.00222), as `compute_token_on_off_policy_loss` of the
    authors' code (YihongDong/RL-PLUS, rl_plus/verl/verl/recipe/rlplus_core_alg.py). Multiple importance sampling: the
    policy that wrote the demonstration is unknown and estimated by omega = (pi_old + 1) / 2, and rho = 2 pi / (pi_old +
    omega), where pi_old is the proximal policy. Nothing is clipped. A demonstration is taken to be right and is a
    member of its group: A = 1 - the mean of the sampled rewards and its own 1, without a standard deviation; rewards
    are within [0, 1]. The modifier `external_member` centres the sampled responses on the same mean.
    """

    power: Scalar = 0.5
    """The exponent of the exploration-based advantage, at least 0; 0: every token has the advantage itself."""
    average: Average = "constant"
    """constant: divide the sum over a demonstration by a fixed length (the authors'); tokens; sequences; groups."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    shows_demonstrations = True

    def weights(self, batch: Batch) -> list[np.ndarray]:
        """Return the advantage at the tokens of demonstrations and 0 elsewhere: one float32 array [T_b] each."""
        reward = batch.column("reward")
        advantage = np.zeros(len(batch))
        for group in batch.groups():
            values = reward[group.index]
            # Undecided members, the demonstration itself among them, are NaN and stay out of the mean. A group without
            # a decided member has nothing to compare with.
            known = values[np.isfinite(values)]
            if len(known):
                # 1 - (sum + 1) / (n + 1)
                advantage[group.index] = (1.0 - known.mean()) * len(known) / (len(known) + 1)
        # Where all sampled responses are right the advantage is 0. The demonstration is counted by the average all the
        # same, as the authors count it, which takes a weight that is not 0.
        advantage = np.maximum(advantage, np.finfo(np.float32).tiny)
        return [
            ((r.origin == Origin.DEMONSTRATION) * a).astype(np.float32)
            for r, a in zip(batch.rollouts, advantage.tolist(), strict=True)
        ]

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T] each.
        p = tokens.logprobs.exp()
        old = tokens.proximal_logprobs.detach().exp()
        # The mixture of the old policy and the estimated external one, pi_old / 2 + omega / 2.
        mixture = (old + 0.5 * (old + 1.0)) / 2
        ratio = p / mixture
        # A float32 probability may round to above 1, and a negative base with a power like 0.5 is NaN.
        exploration = (1.0 - p.detach()).clamp_min(0.0) ** float(self.power)
        return LossTerm(-tokens.average(ratio * exploration, self.average, over))
