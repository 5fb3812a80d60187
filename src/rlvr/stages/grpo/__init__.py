"""The grpo stage: what is collected, how it is scored, and what is optimised."""

from rlvr.stages.grpo.stage import GRPOStage

__all__ = [
    "GRPOStage",
]
