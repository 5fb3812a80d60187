"""Evaluation: estimators, the run of one over held-out tasks, and statistics of its results."""

from rlvr.evaluation.contamination import contamination
from rlvr.evaluation.estimators import best_of_k, interquartile_mean, interval, majority_at_k, pass_at_k
from rlvr.evaluation.evaluation_loop import Collect, Evaluation, SameAnswer, Scorer, evaluate
from rlvr.evaluation.paired_comparison import compare, comparison_lines
from rlvr.evaluation.result import describe, over_runs, read_result, write_task_results
from rlvr.evaluation.task_result import TaskResult, summary, values_of

__all__ = [
    "Collect",
    "Evaluation",
    "SameAnswer",
    "Scorer",
    "TaskResult",
    "best_of_k",
    "compare",
    "comparison_lines",
    "contamination",
    "describe",
    "evaluate",
    "interquartile_mean",
    "interval",
    "majority_at_k",
    "over_runs",
    "pass_at_k",
    "read_result",
    "summary",
    "values_of",
    "write_task_results",
]
