"""From rewards to advantages: pure functions of a batch, numpy in, numpy out.

An estimator reads the column `reward` (float64 [B], NaN where undecided) and returns float64 [B] advantages: 0 for
undecided rollouts, which also stay out of every baseline and scale.
"""

from rlvr.advantages.group import GroupAdvantage, group_advantage

__all__ = ["GroupAdvantage", "group_advantage"]
