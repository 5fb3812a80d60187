"""Results of a verifier on responses that are known to be right or wrong: precision, recall and the two error rates.

A response is accepted with full marks (a score of 1), as `python -m rlvr.audit` counts it and training counts pass@k,
or, with a threshold, from that score on.
"""

from __future__ import annotations

import numpy as np

from rlvr.data.labelled_responses import LabelledRow
from rlvr.evaluation.scored_rows import RowKind, ScoredRow, Sums, f1_score, quotient, ratio, share
from rlvr.records import Verdict, VerdictStatus


def _accuracy(sums: Sums) -> np.ndarray:
    return quotient(_agreeing(sums), sums["rows"] - sums["undecided"])


def _accuracy_of_all(sums: Sums) -> np.ndarray:
    return quotient(_agreeing(sums), sums["rows"])


def _agreeing(sums: Sums) -> np.ndarray:
    return sums["accepted_right"] + sums["rejected_wrong"]


RESPONSES = RowKind(
    "responses",
    {
        "accuracy": _accuracy,
        "precision": share("accepted_right", "accepted_wrong"),
        "recall": share("accepted_right", "rejected_right"),
        "f1": f1_score("accepted_right", "accepted_wrong", "rejected_right"),
        "false_positive_rate": share("accepted_wrong", "rejected_wrong"),
        "false_negative_rate": share("rejected_right", "accepted_right"),
        "undecided": ratio("undecided", "rows"),
        "accuracy_of_all": _accuracy_of_all,
    },
    "f1",
)
"""`precision`: right ones of those accepted. `recall`: accepted ones of those that are right. `false_positive_rate`:
accepted ones of those that are wrong; `false_negative_rate`: rejected ones of those that are right. Undecided verdicts
are left out of these; `accuracy_of_all` counts them as wrong."""


def scored_response(row: LabelledRow, verdict: Verdict, threshold: float | None = None) -> ScoredRow:
    """A readable row, which has `expected`, with the verdict on its completion."""
    assert row.task is not None and row.expected is not None
    counts = dict.fromkeys(("accepted_right", "accepted_wrong", "rejected_right", "rejected_wrong"), 0.0)
    counts |= {"rows": 1.0, "undecided": float(not verdict.decided)}
    points = []
    if verdict.score is not None:
        accepted = verdict.status is VerdictStatus.CORRECT if threshold is None else verdict.score >= threshold
        counts[("accepted" if accepted else "rejected") + ("_right" if row.expected else "_wrong")] = 1.0
        points = [(verdict.score, float(row.expected))]
    written = {"score": verdict.score, "expected": row.expected}
    return ScoredRow(row.task.id, row.task.source, counts, written, rated=points, outcomes=points)
