"""Evaluation: estimators, and the run of one over held-out tasks."""

from rlvr.evaluation.estimators import majority_at_k, pass_at_k
from rlvr.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate", "majority_at_k", "pass_at_k"]
