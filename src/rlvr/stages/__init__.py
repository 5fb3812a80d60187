"""The kinds of stage that a run is made of."""

from rlvr.core.moved import renamed
from rlvr.stages.base import Stage, StageContext
from rlvr.stages.grpo import GRPOStage
from rlvr.stages.sft import SFTStage

__all__ = ["GRPOStage", "SFTStage", "Stage", "StageContext"]

__getattr__ = renamed(__name__, {"Parts": "StageContext"})
