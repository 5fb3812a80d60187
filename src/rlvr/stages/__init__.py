"""The kinds of stage that a run is made of."""

from rlvr.stages.base import Parts, Stage
from rlvr.stages.grpo import GRPOStage
from rlvr.stages.sft import SFTStage

__all__ = ["GRPOStage", "Parts", "SFTStage", "Stage"]
