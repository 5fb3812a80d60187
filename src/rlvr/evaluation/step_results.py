"""Results of a verifier that scores steps, such as a process reward model, on solutions with labelled steps.

ProcessBench (Zheng et al. 2024, arXiv 2412.06559): a row with a wrong step is right where the first step that the
verifier rejects is the first wrong one, a row without one where it rejects none; F1 is the harmonic mean of the two
accuracies (QwenLM/ProcessBench@e802463 code/run_eval.py). A step is rejected if it scores less than the threshold.
Undecided rows are left out of these, and count as wrong in `f1_of_all`, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.data.step_rows import StepRow
from rlvr.evaluation.scored_rows import RowKind, ScoredRow, Sums, f1_score, harmonic_mean, quotient, ratio, share
from rlvr.records import Verdict


def _f1(sums: Sums) -> np.ndarray:
    errors = quotient(sums["found"], sums["erroneous"])
    return harmonic_mean(errors, quotient(sums["passed"], sums["correct"]))


def _f1_of_all(sums: Sums) -> np.ndarray:
    errors = quotient(sums["found"], sums["erroneous_of_all"])
    return harmonic_mean(errors, quotient(sums["passed"], sums["correct_of_all"]))


STEPS = RowKind(
    "steps",
    {
        "f1": _f1,
        "error_accuracy": ratio("found", "erroneous"),
        "correct_accuracy": ratio("passed", "correct"),
        "undecided": ratio("undecided", "rows"),
        "f1_of_all": _f1_of_all,
        "step_precision": share("rejected_wrong", "rejected_right"),
        "step_recall": share("rejected_wrong", "accepted_wrong"),
        "step_f1": f1_score("rejected_wrong", "rejected_right", "accepted_wrong"),
    },
    "f1",
)
"""`error_accuracy` and `correct_accuracy`: of rows with and without a wrong step. `step_precision`, `step_recall`,
`step_f1`: over all labelled steps, a wrong step that is rejected being a hit; ProcessBench labels none after the
first wrong one."""


def step_scores(row: StepRow, verdict: Verdict) -> list[float | None]:
    """The score of each step: the least of the verdict's spans that overlap it, since a verifier may cut a step in
    several or join several; None where none does."""
    scores: list[float | None] = []
    for start, end in row.places:
        over = [score for first, last, score in verdict.spans if first < end and start < last]
        scores.append(min(over, default=None))
    return scores


def scored_steps(row: StepRow, verdict: Verdict, threshold: float = 0.5) -> ScoredRow:
    """The row with the verdict on its text."""
    has_error = row.first_wrong >= 0
    counts = dict.fromkeys(
        ("erroneous", "found", "correct", "passed", "rejected_wrong", "rejected_right", "accepted_wrong"), 0.0
    )
    counts |= {
        "rows": 1.0,
        "undecided": float(not verdict.decided),
        "erroneous_of_all": float(has_error),
        "correct_of_all": float(not has_error),
    }
    written = {"score": verdict.score, "steps": None, "label": row.first_wrong, "prediction": None}
    if verdict.score is None:
        return ScoredRow(row.task.id, row.task.source, counts, written)
    scores = step_scores(row, verdict)
    rejected = [score is not None and score < threshold for score in scores]
    predicted = rejected.index(True) if True in rejected else -1
    counts["erroneous" if has_error else "correct"] = 1.0
    if predicted == row.first_wrong:
        counts["found" if has_error else "passed"] = 1.0
    for is_rejected, wrong in zip(rejected, row.wrong, strict=True):
        if wrong is not None and (is_rejected or wrong):
            name = ("rejected" if is_rejected else "accepted") + ("_wrong" if wrong else "_right")
            counts[name] += 1.0
    labelled = zip(scores, row.wrong, strict=True)
    return ScoredRow(
        row.task.id,
        row.task.source,
        counts,
        {**written, "steps": scores, "prediction": predicted},
        rated=[(score, float(not wrong)) for score, wrong in labelled if score is not None and wrong is not None],
        outcomes=_outcomes(row, verdict.score),
    )


def _outcomes(row: StepRow, score: float) -> Sequence[tuple[float, float]]:
    if row.final_answer_correct is None:
        return ()
    return [(score, float(row.final_answer_correct))]
