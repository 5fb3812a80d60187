"""Groups that agree learn from how their prompt did beside the other prompts of the batch.

The estimator blends a local and a global advantage, and the loss clips each of the two by itself, as the paper does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rlvr.advantages.group import group_advantage, means, same, std
from rlvr.components import Advantage, Loss
from rlvr.core.needs import PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.clip import hard
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch, log_ratio
from rlvr.records import Batch
from rlvr.registry import register

LOCAL = "advantage/local"
"""Column of the batch: the share of the advantage that is the group's."""
GLOBAL = "advantage/global"
"""Column of the batch: the share that is the prompt's among the prompts of the batch."""


@register("advantage", "consistency")
@dataclass(frozen=True)
class Consistency(Advantage):
    """w local + (1 - w) global, w = sigmoid(sharpness (H - level)), H the entropy of the group's answers in bits.

    COPO (Han et al. 2025, arXiv 2508.04138; as the authors' code, hijih/copo-code, verl/trainer/ppo/core_algos.py).
    local is GRPO's advantage; global is the prompt's mean reward, centred and scaled over the batch's prompts, the same
    for all its responses. So a group whose answers all agree, right or wrong, has an advantage still. Deviations are
    with n - 1. What the authors call COPO (`soft-with-zero`) is `zeros` without `forced` and `agreement`, at level 1;
    `forced` alone is their `soft-with-forced`. The two shares of the sum are the columns `advantage/local` and
    `advantage/global` of the batch, for the loss `clip_local_and_global`, which clips each by itself as the authors do;
    other losses clip by the sum. Modifiers change the sum alone, and are refused with that loss.
    Answers are those that the verifier extracted, compared as text; a response without one is an answer of its own. A
    large negative level and `forced: false` are local alone.
    """

    sharpness: Scalar = 5.0
    """Steepness of the change from global to local as the entropy grows (their k)."""
    level: Scalar = 1.0
    """The entropy at which both weigh the same (their b)."""
    agreement: bool = True
    """Multiply the prompt's mean reward by 1 - (1 - 1 / n) H / log2 n for n responses, which is how far its answers
    agree (their reward_coef_flg, which is off in the script)."""
    forced: bool = True
    """Groups of equal rewards, which have no local advantage, take the global one whole."""
    zeros: bool = False
    """Responses with a reward of 0 take the global advantage whole: a wrong one learns from its prompt alone."""
    epsilon: float = 1e-6
    """Added to standard deviations."""
    smallest_group: ClassVar = 2
    makes: ClassVar = (LOCAL, GLOBAL)

    def __call__(self, batch: Batch) -> np.ndarray:
        rewards = batch.column("reward")
        groups = batch.group_index()
        # float64 [B]: GRPO's (r - mean) / (std + epsilon) within the group.
        local = group_advantage(rewards, groups, epsilon=self.epsilon, unbiased=True)
        of_group = np.zeros(len(batch))
        of_prompt = np.zeros(len(batch))
        batch.columns |= {LOCAL: of_group, GLOBAL: of_prompt}
        on = np.isfinite(rewards)
        if not on.any():
            return of_group + of_prompt
        # Numbered anew over the groups with a decided member, so that bincount has no empty group.
        g = np.unique(groups[on], return_inverse=True)[1]
        answers = [None if r.verdict is None else r.verdict.answer for r in batch.rollouts]
        answers = [answers[i] for i in np.flatnonzero(on)]
        members = np.split(np.argsort(g, kind="stable"), np.cumsum(np.bincount(g))[:-1])
        # [G] H in bits, 0 where all agree and log2 n where all differ.
        entropy = np.asarray([_entropy([answers[i] for i in index]) for index in members])
        rates = means(rewards[on], g)
        size = np.bincount(g)
        if self.agreement:
            # From the mean reward itself at H = 0 down to 1 / n of it at H = log2 n. A group of one has H = 0; the
            # maximum keeps log2(1) = 0 out of the denominator.
            rates = rates * (1 - (1 - 1 / size) * entropy / np.log2(np.maximum(size, 2)))
        # Over the batch's prompts, not its responses: each prompt counts once.
        spread = std(rates, unbiased=True)
        if spread > 0:
            over_batch = (rates - rates.mean()) / (spread + self.epsilon)
        else:
            over_batch = np.zeros(len(rates))
        odds = float(self.sharpness) * (entropy - float(self.level))
        # sigmoid(odds), in a form that does not overflow for a level of large size.
        weight = 0.5 * (1 + np.tanh(odds / 2))
        if self.forced:
            weight = np.where(same(rewards[on], g), 0.0, weight)
        # [decided]: the weight of the local advantage of each response.
        weight = weight[g]
        if self.zeros:
            weight = np.where(rewards[on] == 0, 0.0, weight)
        of_group[on] = weight * local[on]
        of_prompt[on] = (1 - weight) * over_batch[g]
        return of_group + of_prompt


def _entropy(answers: list[str | None]) -> float:
    # The prefixes keep an answer such as "3" apart from a missing one with number 3; each missing answer is its own
    # kind.
    kinds = Counter(f"={a.strip()}" if a is not None else f"?{i}" for i, a in enumerate(answers))
    share = np.fromiter(kinds.values(), dtype=np.float64) / len(answers)
    return float(-(share * np.log2(share)).sum())


@register("loss", "clip_local_and_global")
@dataclass(frozen=True)
class LocalAndGlobalClippedLoss(Loss):
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), summed over the local and the global share A of the
    advantage `consistency`.

    COPO's w L_local + (1 - w) L_global (hijih/copo-code, verl/trainer/ppo/core_algos.py,
    compute_policy_loss_with_global): the weights are in the shares, which a clipped loss is proportional to. Where the
    two push a token to different sides, the clip of one does not hold back the other. Another advantage makes no
    shares, and what changes the advantage afterwards does not change them: both are refused.
    """

    clip_low: Scalar = 0.2
    """The ratio is not rewarded for falling below 1 - clip_low."""
    clip_high: Scalar = 0.2
    """The ratio is not rewarded for rising above 1 + clip_high."""
    cap: Scalar | None = 3.0
    """The ratio's bound where a share is negative (dual clip), above 1 + clip_high; null: none."""
    average: Average = "sequences"
    """tokens: every token weighs the same; sequences: every response; groups: every group; constant: divide by a fixed
    length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""

    needs = frozenset({Need("logprobs", grad=True), Need("logprobs", PROXIMAL)})
    reads = (LOCAL, GLOBAL)

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        # [T] log rho, with gradient.
        log_ratios = log_ratio(tokens)
        cap = None if self.cap is None else float(self.cap)
        bounds = (1 - float(self.clip_low), 1 + float(self.clip_high), cap)
        # [T] each.
        local = hard(log_ratios, tokens.columns[LOCAL], *bounds)
        over_batch = hard(log_ratios, tokens.columns[GLOBAL], *bounds)
        ratio = log_ratios.detach().exp()
        # Clipped for one share or for both.
        low = (local.low | over_batch.low).float()
        high = (local.high | over_batch.high).float()
        metrics = {"ratio/mean": ratio, "ratio/max": ratio, "ratio/clipped_low": low, "ratio/clipped_high": high}
        # The surrogate is maximised and the learner minimises.
        return LossTerm(-tokens.average(local.value + over_batch.value, self.average, over), metrics)
