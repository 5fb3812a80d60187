"""From rewards to advantages: pure functions of a batch, numpy in, numpy out.

An estimator reads the column `reward` (float64 [B], NaN where undecided) and returns float64 [B] advantages, or a list
of one array [T_b] per rollout: 0 for undecided rollouts, which also stay out of every baseline and scale. Modifiers
change what an estimator gave. What either may declare, all optional: `smallest_group`, `needs` (statistics of the
policy before the update, found in the token columns `STATISTIC/current`), `per_token` (it gives a number per token),
`per_response` (it needs one per response), `reads_characters` (it reads `Rollout.char_ends`), `reads_verdict_spans` (it
reads `Verdict.spans`, so that a verifier without any is refused), `check(config, tasks)`, and for a component with a
memory `observe(metrics)`, `state_dict` and `load_state_dict`; an estimator also `makes`, the columns `advantage/NAME`
that it adds to the batch for losses that read them.
"""

from rlvr.advantages.group import GroupAdvantage, group_advantage
from rlvr.advantages.modifiers import Clip, Entropy, Length, Outliers, Whiten, informative
from rlvr.advantages.optimal_token import OptimalTokenBaseline
from rlvr.advantages.pass_at_k import PassAtK
from rlvr.advantages.spans import SpanAdvantage

__all__ = [
    "Clip",
    "Entropy",
    "GroupAdvantage",
    "Length",
    "OptimalTokenBaseline",
    "Outliers",
    "PassAtK",
    "SpanAdvantage",
    "Whiten",
    "group_advantage",
    "informative",
]
