"""Verifier-free against verifier-based models at equal test-time compute.

Setlur et al. 2025, "Scaling Test-Time Compute Without Verification or RL is Suboptimal", arXiv 2502.12118: compute is
the length of the output in tokens. The budget of a row is k responses of at most H tokens, for both sides the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.analysis.analysis_table import AnalysisTable, Evaluated, common_ids, paired_change
from rlvr.analysis.support_dynamics import length_of
from rlvr.errors import DataError
from rlvr.evaluation import values_of
from rlvr.evaluation.task_result import mean

COLUMNS = [
    *("budget", "k", "longest", "tasks", "free by", "free", "free tokens"),
    *("based by", "based", "based tokens", "difference", "95 %"),
]


def budget_table(free: Sequence[Evaluated], based: Sequence[Evaluated], ks: Sequence[int] = ()) -> AnalysisTable:
    """A row for each longest response H and each k that both sides have, from the smallest budget k x H on.

    The verifier-free side answers by majority, the verifier-based one by its scorer's best of k, or by majority where
    it was evaluated without a scorer; k = 1 is a single sample. `free tokens` and `based tokens` are what was used for
    a task on average, which a response that ends early makes less than the budget. DataError where the sides have no
    H or no k in common, or a file does not say how it was sampled.
    """
    of_free = _by_longest(free)
    of_based = _by_longest(based)
    longest = sorted(set(of_free) & set(of_based))
    if not longest:
        raise DataError(
            f"no longest response is common to both sides: {sorted(of_free)} and {sorted(of_based)} tokens "
            "(--max-new-tokens of rlvr.evaluate)"
        )
    table = AnalysisTable(COLUMNS)
    if left := sorted(set(of_free) ^ set(of_based)):
        table.notes.append(f"Evaluated on one side alone, and left out: at most {', '.join(map(str, left))} tokens.")
    for tokens in longest:
        pair = (of_free[tokens], of_based[tokens])
        ids = common_ids(pair, table.notes)
        shared = [k for k in pair[0].settings["k"] if k in pair[1].settings["k"]]
        if not ks and not shared:
            raise DataError(
                f"no k is common to {pair[0].path} ({pair[0].settings['k']}) and {pair[1].path} "
                f"({pair[1].settings['k']}): evaluate both with the same --k"
            )
        for k in ks or shared:
            table.rows.append(_row(pair, ids, k, tokens))
    table.rows.sort(key=lambda row: (row[0], row[1]))
    table.notes = list(dict.fromkeys(table.notes))
    return table


def _by_longest(evaluated: Sequence[Evaluated]) -> dict[int, Evaluated]:
    by_longest: dict[int, Evaluated] = {}
    for one in evaluated:
        sampling = one.settings.get("sampling")
        if not isinstance(sampling, dict):
            raise DataError(f"{one.path} does not say how long responses could be: take an --output of rlvr.evaluate")
        tokens = int(sampling["max_new_tokens"])
        if tokens in by_longest:
            raise DataError(f"{by_longest[tokens].path} and {one.path} both have responses of at most {tokens} tokens")
        by_longest[tokens] = one
    return by_longest


def _row(pair: tuple[Evaluated, Evaluated], ids: Sequence[str], k: int, tokens: int) -> list[object]:
    cells: list[object] = [k * tokens, k, tokens, len(ids)]
    sides = []
    for one, judged in zip(pair, (False, True), strict=True):
        task_results = one.on(ids)
        by_name = values_of(task_results, [k])
        name = f"maj@{k}"
        if k == 1:
            name = "mean"
        elif judged and f"best@{k}" in by_name:
            name = f"best@{k}"
        if np.isnan(by_name[name]).all():
            voted = " and a verifier that names answers" if name.startswith("maj") else ""
            raise DataError(f"{one.path} has no {name}: evaluate with --k {k}{voted}")
        used = length_of(task_results)
        cells += [name, mean(by_name[name]), None if used is None else k * used]
        sides.append(by_name[name])
    change, span = paired_change(*sides)
    return [*cells, change, span]
