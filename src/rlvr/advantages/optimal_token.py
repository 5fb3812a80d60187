"""The optimal token baseline: one baseline for each position of the responses of a group.

Invariants: a token's baseline is a mean of its group's rewards, so equal rewards give exactly 0 where two responses are
compared; tokens that the policy did not write have 0; undecided responses stay out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.advantages.group import FlatTokens, decided, same
from rlvr.components import Advantage
from rlvr.core.needs import CURRENT, Need
from rlvr.records import Batch
from rlvr.registry import register


@register("advantage", "optimal_token")
@dataclass(frozen=True)
class OptimalTokenBaseline(Advantage):
    """Reward minus, at the t-th token, the mean reward of the group's responses that reach it, weighted by W_t.

    W_t is the sum up to t of 1 - 2 p + sum of p^2 over the vocabulary: the squared norm of the gradient of the log-prob
    in the logits, which stands for that in the weights (Li et al. 2026, "The optimal token baseline", the
    logit-gradient proxy; volcengine/verl, commit b178a3c, verl/trainer/ppo/core_algos.py,
    `compute_optimal_token_baseline_advantage`). It takes one forward pass more.
    """

    tail: Literal["reward", "none"] = "reward"
    """The baseline at tokens that only one response of the group is long enough to have. reward: 0, as with
    verl's `handle_zero_tail`, which its estimator for several turns sets; none: the response's own reward, so that the
    advantage is 0, as in its estimator for one turn."""

    needs = frozenset({Need("logprobs"), Need("sum_squared_probs")})
    per_token = True
    smallest_group = 2

    def __call__(self, batch: Batch) -> list[np.ndarray]:
        tokens = FlatTokens.of(batch)
        rewards = np.where(decided(batch), batch.column("reward"), 0.0)
        live = tokens.sampled & decided(batch)[tokens.rollout]
        of = tokens.rollout[live]
        groups = batch.group_index()
        logprobs, squares = (
            tokens.flat(batch.tokens(f"{name}/{CURRENT}"))[live] for name in ("logprobs", "sum_squared_probs")
        )
        # The squared norm |e_y - p|^2 = 1 - 2 p_y + sum_v p_v^2, where e_y - p is the gradient of log p_y in the
        # logits. Rounding may make it slightly negative where p_y is 1. float64 [sampled tokens]
        energy = np.maximum(1.0 - 2.0 * np.exp(logprobs) + squares, 0.0)
        position, weight = _along(of, energy)
        # every (group, position) is a cell: its members are the tokens at that place of the group's responses
        width = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(width, groups, np.bincount(of, minlength=len(batch)))
        cell = (np.cumsum(width) - width)[groups[of]] + position
        count = np.bincount(cell)
        # Per cell, b_t = sum_i W_i,t r_i / sum_i W_i,t; the plain mean where all weights are 0.
        total = np.bincount(cell, weight)
        plain = np.bincount(cell, rewards[of]) / np.maximum(count, 1)
        weighted = np.bincount(cell, weight * rewards[of]) / np.where(total > 0, total, 1.0)
        baseline = np.where(total > 0, weighted, plain)
        if len(of):
            # Compared and not subtracted: a weighted mean of equal rewards may differ from them in the last bit.
            equal = same(rewards[decided(batch)], groups[decided(batch)])
        else:
            equal = np.zeros(0, dtype=bool)
        advantage = np.where(equal[groups[of]], 0.0, rewards[of] - baseline[cell])
        result = np.zeros(len(live))
        # A cell with one token compares it with itself alone.
        result[live] = np.where(count[cell] > 1, advantage, rewards[of] if self.tail == "reward" else 0.0)
        return tokens.split(result)


def _along(of: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place within its response, sum of `values` up to and with it) of each token; `of` is the response, in order."""
    # Where the response changes; -1 is before the first, so that index 0 is a start.
    starts = np.flatnonzero(np.diff(of, prepend=-1))
    response = np.cumsum(np.diff(of, prepend=-1) != 0) - 1
    # One cumulative sum over all responses, less what was summed before each of them began.
    running = np.cumsum(values)
    before = np.concatenate([[0.0], running])[starts]
    return np.arange(len(of)) - starts[response], running - before[response]
