"""The kinds of stage that a run is made of."""

from rlvr.core.moved import renamed
from rlvr.stages.grpo import GRPOStage
from rlvr.stages.sft import SFTStage
from rlvr.stages.stage_base import Stage, StageContext

__getattr__ = renamed(__name__, {"Parts": "StageContext"})
