"""rlvr: reinforcement learning from verifiable rewards for language models.

The public names, imported on first use, so that `import rlvr` is fast and pulls in no torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlvr.core.moved import MovedModules, found_on_first_use

__version__ = "0.1.0"

_HOME, __getattr__ = found_on_first_use(
    __name__,
    {
        "rlvr.trainer": "GRPOTrainer",
        "rlvr.config": "Config",
        "rlvr.config.config_loading": "load_config",
        "rlvr.records": "Task Rollout Group Batch Verdict VerdictStatus Origin StopReason",
        "rlvr.verifiers": (
            "Verifier FunctionVerifier MathVerifier BleuVerifier BoxesVerifier ChoiceVerifier CombineVerifier "
            "CountdownVerifier ExactVerifier FormatVerifier IntervalVerifier KnightsAndKnavesVerifier "
            "LabelVerifier NumericVerifier PointVerifier RankingVerifier RatingVerifier ReasoningGymVerifier "
            "RegexVerifier RougeVerifier SudokuVerifier TokenF1Verifier InstructionsVerifier JsonSchemaVerifier "
            "ToolCallVerifier"
        ),
        "rlvr.registry": (
            "register_verifier register_reward register_selector register_advantage register_modifier "
            "register_loss register_sampler register_plan register_stage"
        ),
    },
)
__all__ = [*_HOME, "__version__"]

# One import for each module, where the sorting of imports would make one for each name.
# isort: off
if TYPE_CHECKING:
    from rlvr.config import Config as Config
    from rlvr.config.config_loading import load_config as load_config
    from rlvr.records import (
        Batch as Batch,
        Group as Group,
        Origin as Origin,
        Rollout as Rollout,
        StopReason as StopReason,
        Task as Task,
        Verdict as Verdict,
        VerdictStatus as VerdictStatus,
    )
    from rlvr.registry import (
        register_advantage as register_advantage,
        register_loss as register_loss,
        register_modifier as register_modifier,
        register_plan as register_plan,
        register_reward as register_reward,
        register_sampler as register_sampler,
        register_selector as register_selector,
        register_stage as register_stage,
        register_verifier as register_verifier,
    )
    from rlvr.trainer import GRPOTrainer as GRPOTrainer
    from rlvr.verifiers import (
        BleuVerifier as BleuVerifier,
        BoxesVerifier as BoxesVerifier,
        ChoiceVerifier as ChoiceVerifier,
        CombineVerifier as CombineVerifier,
        CountdownVerifier as CountdownVerifier,
        ExactVerifier as ExactVerifier,
        FormatVerifier as FormatVerifier,
        FunctionVerifier as FunctionVerifier,
        InstructionsVerifier as InstructionsVerifier,
        IntervalVerifier as IntervalVerifier,
        JsonSchemaVerifier as JsonSchemaVerifier,
        KnightsAndKnavesVerifier as KnightsAndKnavesVerifier,
        LabelVerifier as LabelVerifier,
        MathVerifier as MathVerifier,
        NumericVerifier as NumericVerifier,
        PointVerifier as PointVerifier,
        RankingVerifier as RankingVerifier,
        RatingVerifier as RatingVerifier,
        ReasoningGymVerifier as ReasoningGymVerifier,
        RegexVerifier as RegexVerifier,
        RougeVerifier as RougeVerifier,
        SudokuVerifier as SudokuVerifier,
        TokenF1Verifier as TokenF1Verifier,
        ToolCallVerifier as ToolCallVerifier,
        Verifier as Verifier,
    )
# isort: on

sys.meta_path.append(MovedModules())


def __dir__() -> list[str]:
    return sorted(__all__)
