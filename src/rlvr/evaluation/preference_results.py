"""Results of a verifier on preference rows: does it score the chosen responses above the rejected ones?

A row counts once, however many pairs of a chosen and a rejected response it has. Equal scores are half a win: published
figures of RewardBench and RM-Bench count them as wrong (allenai/reward-bench@05a9005 scripts/run_rm.py,
THU-KEG/RM-Bench@73c52d7 scripts/utils.py), which is `accuracy` less half of `ties`. Undecided pairs are left out of
`accuracy`, as of all results of an evaluation, and count as wrong in `accuracy_of_all`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.data.preference_rows import PreferenceRow
from rlvr.evaluation.scored_rows import RowKind, ScoredRow, ratio
from rlvr.records import Verdict

CONSISTENT = "consistent"
"""The name among `Verdict.scores` of the share of comparisons on which both orders agree (verifier `pairs`)."""

PREFERENCES = RowKind(
    "preferences",
    {
        "accuracy": ratio("won", "decided_rows"),
        "ties": ratio("tied", "decided_rows"),
        "undecided": ratio("undecided", "rows"),
        "accuracy_of_all": ratio("won_of_all", "rows"),
        "best_of_n": ratio("best", "best_rows"),
        "swap_consistency": ratio("consistent", "swapped_rows"),
        "accuracy_chosen_shorter": ratio("won_shorter", "shorter_rows"),
        "accuracy_chosen_longer": ratio("won_longer", "longer_rows"),
        "accuracy_easy": ratio("won_easy", "styled_rows"),
        "accuracy_normal": ratio("won_normal", "styled_rows"),
        "accuracy_hard": ratio("won_hard", "styled_rows"),
    },
    "accuracy",
)
"""`accuracy`: the mean over rows of the share of pairs in which the chosen response scores higher, a tie counting half.
`ties`: the share of pairs with equal scores. `best_of_n`: of rows with three or more responses, all decided, the chance
that a response of the highest score is a chosen one; with one chosen it is RewardBench 2's (reroll_and_score_dataset in
rewardbench/utils.py). `swap_consistency`: the share of comparisons with one outcome in both orders.
`accuracy_chosen_shorter` and `..._longer`: of pairs whose chosen response has fewer, or more, characters.
`accuracy_easy` and so on: RM-Bench's, of rows whose responses are in the order of their styles."""


def scored_preference(row: PreferenceRow, verdicts: Sequence[Verdict], styled: bool = False) -> ScoredRow:
    """The row with the verdicts on `row.responses`; `styled`: its chosen and its rejected responses are in the order of
    their styles, from plain to rich."""
    scores = np.asarray([np.nan if verdict.score is None else verdict.score for verdict in verdicts])
    lengths = np.asarray([len(text) for text in row.responses])
    count = len(row.chosen)
    # [C, R] for C chosen and R rejected responses.
    change = scores[:count, None] - scores[None, count:]
    longer = lengths[:count, None] - lengths[None, count:]
    known = ~np.isnan(change)
    won = np.where(known, (change > 0) + 0.5 * (change == 0), np.nan)
    counts = {
        "rows": 1.0,
        "undecided": 1.0 - known.mean(),
        "won_of_all": np.nansum(won) / won.size,
        **_mean_of(won, known, "won", "decided_rows"),
        "tied": float((won[known] == 0.5).mean()) if known.any() else 0.0,
        **_mean_of(won, known & (longer < 0), "won_shorter", "shorter_rows"),
        **_mean_of(won, known & (longer > 0), "won_longer", "longer_rows"),
        **_best(scores, count),
        **_consistent(verdicts),
        **_styles(won, known, styled),
    }
    chosen, rejected = ([verdict.score for verdict in part] for part in (verdicts[:count], verdicts[count:]))
    rated = [(score, 1.0) for score in chosen if score is not None]
    rated += [(score, 0.0) for score in rejected if score is not None]
    return ScoredRow(
        row.task.id,
        row.task.source,
        {name: float(value) for name, value in counts.items()},
        {"chosen": chosen, "rejected": rejected},
        rated=rated,
        lengths=list(zip(change[known].tolist(), longer[known].tolist(), strict=True)),
    )


def _mean_of(won: np.ndarray, pairs: np.ndarray, name: str, rows: str) -> dict[str, float]:
    """The mean over some pairs of the row, and 1 for the row where it has any."""
    return {name: float(won[pairs].mean()) if pairs.any() else 0.0, rows: float(pairs.any())}


def _best(scores: np.ndarray, count: int) -> dict[str, float]:
    """The chance that a response of the highest score is one of the first `count`."""
    if len(scores) <= 2 or np.isnan(scores).any():
        return {"best": 0.0, "best_rows": 0.0}
    highest = scores == scores.max()
    return {"best": highest[:count].sum() / highest.sum(), "best_rows": 1.0}


def _consistent(verdicts: Sequence[Verdict]) -> dict[str, float]:
    shares = [verdict.scores[CONSISTENT] for verdict in verdicts if verdict.decided and CONSISTENT in verdict.scores]
    return {"consistent": float(np.mean(shares)) if shares else 0.0, "swapped_rows": float(bool(shares))}


def _styles(won: np.ndarray, known: np.ndarray, styled: bool) -> dict[str, float]:
    """RM-Bench's levels: hard, where the chosen response has the plainer style, normal with equal ones, easy."""
    names = ("won_easy", "won_normal", "won_hard")
    if not styled or not known.all() or won.shape[0] != won.shape[1] or len(won) < 2:
        return {**dict.fromkeys(names, 0.0), "styled_rows": 0.0}
    below, above = np.tril_indices(len(won), -1), np.triu_indices(len(won), 1)
    means = (won[below].mean(), np.diag(won).mean(), won[above].mean())
    return {**{name: float(mean) for name, mean in zip(names, means, strict=True)}, "styled_rows": 1.0}
