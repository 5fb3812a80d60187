"""The modifier that mixes the advantages of another column into those of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.advantages.group import AdvantageValues, decided, group_advantage, stds
from rlvr.components import Modifier
from rlvr.config import Config
from rlvr.core.schedules import Scalar, refuse_above, refuse_below
from rlvr.errors import ConfigError, nearest
from rlvr.records import Batch, Task
from rlvr.registry import register


@register("modifier", "blend")
@dataclass(frozen=True)
class Blend(Modifier):
    """(1 - share) advantage + share x the group-normalised values of a reward term.

    LaSeR's mix of the verifier's and the model's own judgement (Yang et al. 2025, arXiv 2510.14943; the form and both
    numbers are confirmed in the authors' scripts), with the term `last_token` at weight 0 and a share that begins after
    a warm-up. The group's mean and standard deviation, as in GRPO. Share 0 changes nothing.
    """

    of: str = "last_token"
    """The reward term, by its name in `rewards` (its weight there may be 0)."""
    share: Scalar = 0.1
    """Share of the term's advantages, 0 to 1."""
    least_std: float = 0.1
    """Groups in which the term's standard deviation is below this have 0 of it."""
    epsilon: float = 1e-4
    """Added to a standard deviation."""

    per_response = True

    def __post_init__(self) -> None:
        refuse_below("share", self.share, 0)
        refuse_above("share", self.share, 1)

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where no reward term has the name."""
        names = [term.column for term in config.rewards]
        if self.of not in names:
            raise ConfigError(
                f"algorithm.modifiers: blend is of {self.of!r}, and there is no such term in "
                f"`rewards`{nearest(self.of, names)}"
            )

    def __call__(self, batch: Batch, advantage: AdvantageValues) -> AdvantageValues:
        assert isinstance(advantage, np.ndarray), "`per_response`: one advantage for each response"
        share = float(self.share)
        # So that a share of 0 changes no bit.
        if share == 0:
            return advantage
        # float64 [B], NaN where the response is undecided or the term has no value.
        values = np.where(decided(batch), batch.column(f"reward/{self.of}"), np.nan)
        groups = batch.group_index()
        own = group_advantage(values, groups, "mean", "std", self.epsilon)
        finite = np.isfinite(values)
        spread = np.zeros(int(groups.max(initial=-1)) + 1)
        finite_stds = stds(values[finite], groups[finite])
        # [G]. The last groups may have no finite value and are missing from what bincount gave; they keep 0.
        spread[: len(finite_stds)] = finite_stds
        # A small deviation in the denominator would enlarge differences that mean nothing.
        return (1 - share) * advantage + share * np.where(spread[groups] >= self.least_std, own, 0.0)
