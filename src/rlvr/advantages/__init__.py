"""From rewards to advantages: pure functions of a batch, numpy in, numpy out.

An estimator reads the column `reward` (float64 [B], NaN where undecided) and returns float64 [B] advantages, or a list
of one array [T_b] per rollout: 0 for undecided rollouts, which also stay out of every baseline and scale. Modifiers
change what an estimator gave. What either may declare, all optional: `smallest_group`, `needs` (statistics of the
policy before the update, found in the token columns `STATISTIC/current`), `per_token` (it gives a number per token),
`per_response` (it needs one per response), `reads_characters` (it reads `Rollout.char_ends`), `check(config, tasks)`,
and for a component with a memory `observe(metrics)`, `state_dict` and `load_state_dict`.
"""

from rlvr.advantages.blend import Blend
from rlvr.advantages.conditional import Conditional
from rlvr.advantages.consistency import Consistency
from rlvr.advantages.exploration import Confidence, Entropy, Surprise
from rlvr.advantages.group import GroupAdvantage, group_advantage
from rlvr.advantages.modifiers import Clip, Length, Outliers, Signs, Whiten, informative
from rlvr.advantages.noise import Noise
from rlvr.advantages.optimal_token import OptimalTokenBaseline
from rlvr.advantages.pass_at_k import PassAtK
from rlvr.advantages.prefix_tree import PrefixTree
from rlvr.advantages.risk import MixedValueAtRisk
from rlvr.advantages.spans import SpanAdvantage

__all__ = [
    "Blend",
    "Clip",
    "Conditional",
    "Confidence",
    "Consistency",
    "Entropy",
    "GroupAdvantage",
    "Length",
    "MixedValueAtRisk",
    "Noise",
    "OptimalTokenBaseline",
    "Outliers",
    "PassAtK",
    "PrefixTree",
    "Signs",
    "SpanAdvantage",
    "Surprise",
    "Whiten",
    "group_advantage",
    "informative",
]
