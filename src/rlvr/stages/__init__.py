"""The kinds of stage that a run is made of."""

from rlvr.stages.grpo import GRPOStage
from rlvr.stages.sft import SFTStage
from rlvr.stages.stage_base import Stage, StageContext

__all__ = ["GRPOStage", "SFTStage", "Stage", "StageContext"]
