"""rlvr: reinforcement learning from verifiable rewards for language models.

The public names, imported on first use, so that `import rlvr` is fast and pulls in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvr.core.first_use import found_on_first_use

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

if TYPE_CHECKING:
    from rlvr.config import Config
    from rlvr.config.config_loading import load_config
    from rlvr.records import Batch, Group, Origin, Rollout, StopReason, Task, Verdict, VerdictStatus
    from rlvr.registry import (
        register_advantage,
        register_loss,
        register_modifier,
        register_plan,
        register_reward,
        register_sampler,
        register_selector,
        register_stage,
        register_verifier,
    )
    from rlvr.trainer import GRPOTrainer
    from rlvr.verifiers import (
        BleuVerifier,
        BoxesVerifier,
        ChoiceVerifier,
        CombineVerifier,
        CountdownVerifier,
        ExactVerifier,
        FormatVerifier,
        FunctionVerifier,
        InstructionsVerifier,
        IntervalVerifier,
        JsonSchemaVerifier,
        KnightsAndKnavesVerifier,
        LabelVerifier,
        MathVerifier,
        NumericVerifier,
        PointVerifier,
        RankingVerifier,
        RatingVerifier,
        ReasoningGymVerifier,
        RegexVerifier,
        RougeVerifier,
        SudokuVerifier,
        TokenF1Verifier,
        ToolCallVerifier,
        Verifier,
    )


def __dir__() -> list[str]:
    return sorted(__all__)
