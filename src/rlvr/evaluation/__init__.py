"""Evaluation: estimators, the run of one over held-out tasks, and what can be said of its results."""

from rlvr.evaluation.compare import compare
from rlvr.evaluation.contamination import contamination
from rlvr.evaluation.estimators import majority_at_k, pass_at_k
from rlvr.evaluation.evaluate import Collect, Evaluation, evaluate
from rlvr.evaluation.intervals import interquartile_mean, interval
from rlvr.evaluation.tally import Tally, summary, values_of

__all__ = [
    "Collect",
    "Evaluation",
    "Tally",
    "compare",
    "contamination",
    "evaluate",
    "interquartile_mean",
    "interval",
    "majority_at_k",
    "pass_at_k",
    "summary",
    "values_of",
]
