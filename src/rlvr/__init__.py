"""rlvr: reinforcement learning from verifiable rewards for language models.

The public names, imported on first use, so that `import rlvr` is fast and pulls in no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rlvr.core.moved import MovedModules

__version__ = "0.1.0"

_HOME = {
    "GRPOTrainer": "rlvr.trainer",
    "Config": "rlvr.config",
    "load_config": "rlvr.config.config_loading",
    "Task": "rlvr.records",
    "Rollout": "rlvr.records",
    "Group": "rlvr.records",
    "Batch": "rlvr.records",
    "Verdict": "rlvr.records",
    "VerdictStatus": "rlvr.records",
    "Origin": "rlvr.records",
    "StopReason": "rlvr.records",
    "Verifier": "rlvr.verifiers",
    "FunctionVerifier": "rlvr.verifiers",
    "MathVerifier": "rlvr.verifiers",
    "BleuVerifier": "rlvr.verifiers",
    "BoxesVerifier": "rlvr.verifiers",
    "ChoiceVerifier": "rlvr.verifiers",
    "CombineVerifier": "rlvr.verifiers",
    "CountdownVerifier": "rlvr.verifiers",
    "ExactVerifier": "rlvr.verifiers",
    "FormatVerifier": "rlvr.verifiers",
    "IntervalVerifier": "rlvr.verifiers",
    "KnightsAndKnavesVerifier": "rlvr.verifiers",
    "LabelVerifier": "rlvr.verifiers",
    "NumericVerifier": "rlvr.verifiers",
    "PointVerifier": "rlvr.verifiers",
    "RankingVerifier": "rlvr.verifiers",
    "RatingVerifier": "rlvr.verifiers",
    "ReasoningGymVerifier": "rlvr.verifiers",
    "RegexVerifier": "rlvr.verifiers",
    "RougeVerifier": "rlvr.verifiers",
    "SudokuVerifier": "rlvr.verifiers",
    "TokenF1Verifier": "rlvr.verifiers",
    "InstructionsVerifier": "rlvr.verifiers",
    "JsonSchemaVerifier": "rlvr.verifiers",
    "ToolCallVerifier": "rlvr.verifiers",
    "register_verifier": "rlvr.registry",
    "register_reward": "rlvr.registry",
    "register_selector": "rlvr.registry",
    "register_advantage": "rlvr.registry",
    "register_modifier": "rlvr.registry",
    "register_loss": "rlvr.registry",
    "register_sampler": "rlvr.registry",
    "register_plan": "rlvr.registry",
    "register_stage": "rlvr.registry",
}

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


sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlvr' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
