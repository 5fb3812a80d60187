"""Results of a verifier on responses that are known to be right or wrong: precision, recall and the two error rates.

A response is accepted with full marks (a score of 1), as `python -m rlvr.audit` counts it and training counts pass@k,
or, with a threshold, from that score on.
"""

from __future__ import annotations

import numpy as np

from rlvr.data.labelled_responses import LabelledRow
from rlvr.evaluation.scored_rows import RowKind, ScoredRow, Sums, quotient, ratio
from rlvr.records import Verdict, VerdictStatus


def _accuracy(sums: Sums) -> np.ndarray:
    return quotient(_agreeing(sums), sums["rows"] - sums["undecided"])


def _accuracy_of_all(sums: Sums) -> np.ndarray:
    return quotient(_agreeing(sums), sums["rows"])


def _agreeing(sums: Sums) -> np.ndarray:
    return sums["accepted_right"] + sums["rejected_wrong"]


def _precision(sums: Sums) -> np.ndarray:
    return quotient(sums["accepted_right"], sums["accepted_right"] + sums["accepted_wrong"])


def _recall(sums: Sums) -> np.ndarray:
    return quotient(sums["accepted_right"], sums["accepted_right"] + sums["rejected_right"])


def _f1(sums: Sums) -> np.ndarray:
    hits = 2 * sums["accepted_right"]
    return quotient(hits, hits + sums["accepted_wrong"] + sums["rejected_right"])


def _false_positive_rate(sums: Sums) -> np.ndarray:
    return quotient(sums["accepted_wrong"], sums["accepted_wrong"] + sums["rejected_wrong"])


def _false_negative_rate(sums: Sums) -> np.ndarray:
    return quotient(sums["rejected_right"], sums["rejected_right"] + sums["accepted_right"])


RESPONSES = RowKind(
    "responses",
    {
        "accuracy": _accuracy,
        "precision": _precision,
        "recall": _recall,
        "f1": _f1,
        "false_positive_rate": _false_positive_rate,
        "false_negative_rate": _false_negative_rate,
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
