"""The learner: one scored batch to optimizer steps."""

from rlvr.learner.learner import Learner

__all__ = [
    "Learner",
]
