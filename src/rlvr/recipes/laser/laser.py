"""LaSeR's score, read off the log-prob of one token after a response, and its share in the advantages.

`rlvr.recipes.laser.last_token_loss` trains the log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues, decided, group_advantage, stds
from rlvr.components import Continuation, Encode, Modifier, RewardTerm
from rlvr.config import Config
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.errors import ConfigError, nearest
from rlvr.records import Batch, Task
from rlvr.registry import register


@register("reward", "last_token")
@dataclass(frozen=True)
class LastTokenScore(RewardTerm):
    """beta (log pi(token | prompt, response) - constant): the policy's estimate that its response is right.

    The score that the auxiliary loss `last_token` trains (LaSeR, Yang et al. 2025, arXiv 2510.14943), for the modifier
    `blend` or as a reward; as a control, its correlation with the verdict says what was learned. 0 for a response that
    was cut off.
    """

    token: str
    """The token, as in the auxiliary loss."""
    beta: float = 0.1
    """As in the auxiliary loss."""
    # log pi of a token that never follows a response; LaSeR takes c_ref = -23 for Qwen2.5 models.
    constant: float = -23.0
    """As in the auxiliary loss."""

    def asks(self, batch: Batch, encode: Encode) -> list[Continuation]:
        """The token after each response that ended by itself. ConfigError where it is no token of the tokenizer."""
        target = encode(self.token)
        if len(target) != 1:
            raise ConfigError(f"rewards: last_token needs one token, and {self.token!r} is {len(target)}")
        ended = [i for i, r in enumerate(batch.rollouts) if not r.stop.truncated]
        return [Continuation(i, batch.rollouts[i].token_ids.tolist(), target) for i in ended]

    def __call__(self, batch: Batch, scored: Sequence[tuple[Continuation, np.ndarray]] = ()) -> np.ndarray:
        result = np.zeros(len(batch))
        for continuation, logprobs in scored:
            result[continuation.rollout] = self.beta * (float(logprobs[0]) - self.constant)
        return result


@register("modifier", "blend")
@dataclass(frozen=True)
class Blend(Modifier):
    """(1 - share) advantage + share x the group-normalised values of a reward term.

    The term is normalised by the group's mean and standard deviation, as in GRPO. A group in which it hardly differs
    (`least_std`) keeps its advantages whole, and so does a response without a value. Share 0 changes nothing.

    LaSeR mixes the verdict and the model's self-assessment in this way (Yang et al. 2025, arXiv 2510.14943; github
    RUCBM/LaSeR, commit 48996f7, verl/trainer/ppo/ray_trainer.py). There the term is `last_token` at weight 0, clipped
    to [0, 1], with a standard deviation over n - 1 and no epsilon; a schedule keeps the share at 0 during a warm-up.
    """

    of: str = "last_token"
    """The reward term, by its name in `rewards` (its weight there may be 0)."""
    share: Scalar = 0.1
    """Weight of the term's advantages, 0 to 1."""
    least_std: float = 0.1
    """The term counts in groups where its standard deviation is above this."""
    epsilon: float = 1e-4
    """Added to the term's standard deviation."""
    unbiased: bool = False
    """A standard deviation with n - 1."""
    bounds: tuple[float, float] | None = None
    """Values of the term are clipped to these, the lower one first; null: they are not."""

    per_response = True

    def __post_init__(self) -> None:
        refuse_below("share", self.share, 0)
        refuse_above("share", self.share, 1)
        if self.bounds is not None and self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"bounds {list(self.bounds)}: the lower one comes first")

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where no reward term has the name."""
        names = [term.column for term in config.rewards]
        if self.of not in names:
            raise ConfigError(
                f"algorithm.modifiers: blend is of {self.of!r}, and there is no such term in "
                f"`rewards`{nearest(self.of, names)}"
            )

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        assert isinstance(advantage, np.ndarray), "one advantage per response is needed (`per_response`)"
        share = float(self.share)
        # Returned unchanged, so that a share of 0 keeps every bit.
        if share == 0:
            return advantage
        # float64 [B], NaN where the response is undecided or the term has no value.
        values = np.where(decided(batch), batch.column(f"reward/{self.of}"), np.nan)
        if self.bounds is not None:
            values = np.clip(values, *self.bounds)
        groups = batch.group_index()
        term_advantage = group_advantage(values, groups, "mean", "std", self.epsilon, self.unbiased)
        finite = np.isfinite(values)
        group_stds = np.zeros(int(groups.max(initial=-1)) + 1)
        # [up to G]: `stds` ends at the last group that has a finite value. Later groups keep 0.
        finite_stds = stds(values[finite], groups[finite], self.unbiased)
        group_stds[: len(finite_stds)] = finite_stds
        # Division by a small standard deviation would amplify noise in the term.
        counts = finite & (group_stds[groups] > self.least_std)
        return np.where(counts, (1 - share) * advantage + share * term_advantage, advantage)
