"""Selectors of the rollouts that train, applied in order, before advantages or after them (`algorithm.select_after`).

A selector is a function of the batch that returns the positions that stay, or a bool for each. It may be a class with
options; options that are Scalars may be schedules or follow a metric. What it may declare besides:
`bind(setting) -> selector`, `smallest_group`, `after` (it reads the column `advantage`, so `select_after` must be set),
and for one with a memory `observe(metrics)`, `state_dict` and `load_state_dict`. Invariants: nothing depends on the
order of rollouts, ties are broken by draw and member; what is undecided is never chosen for its reward.
"""

from rlvr.selection.groups import PassRateBand, SpreadFilter, decided, mixed_groups
from rlvr.selection.member_selectors import BalanceOutcomes, BalanceSources, BestWorst, MostVaried, Shortest

__all__ = [
    "BalanceOutcomes",
    "BalanceSources",
    "BestWorst",
    "MostVaried",
    "PassRateBand",
    "Shortest",
    "SpreadFilter",
    "decided",
    "mixed_groups",
]
