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
    from rlvr.config import Config as Config
    from rlvr.config.config_loading import load_config as load_config
    from rlvr.records import Batch as Batch
    from rlvr.records import Group as Group
    from rlvr.records import Origin as Origin
    from rlvr.records import Rollout as Rollout
    from rlvr.records import StopReason as StopReason
    from rlvr.records import Task as Task
    from rlvr.records import Verdict as Verdict
    from rlvr.records import VerdictStatus as VerdictStatus
    from rlvr.registry import (
        register_advantage as register_advantage,
    )
    from rlvr.registry import (
        register_loss as register_loss,
    )
    from rlvr.registry import (
        register_modifier as register_modifier,
    )
    from rlvr.registry import (
        register_plan as register_plan,
    )
    from rlvr.registry import (
        register_reward as register_reward,
    )
    from rlvr.registry import (
        register_sampler as register_sampler,
    )
    from rlvr.registry import (
        register_selector as register_selector,
    )
    from rlvr.registry import (
        register_stage as register_stage,
    )
    from rlvr.registry import (
        register_verifier as register_verifier,
    )
    from rlvr.trainer import GRPOTrainer as GRPOTrainer
    from rlvr.verifiers import (
        BleuVerifier as BleuVerifier,
    )
    from rlvr.verifiers import (
        BoxesVerifier as BoxesVerifier,
    )
    from rlvr.verifiers import (
        ChoiceVerifier as ChoiceVerifier,
    )
    from rlvr.verifiers import (
        CombineVerifier as CombineVerifier,
    )
    from rlvr.verifiers import (
        CountdownVerifier as CountdownVerifier,
    )
    from rlvr.verifiers import (
        ExactVerifier as ExactVerifier,
    )
    from rlvr.verifiers import (
        FormatVerifier as FormatVerifier,
    )
    from rlvr.verifiers import (
        FunctionVerifier as FunctionVerifier,
    )
    from rlvr.verifiers import (
        InstructionsVerifier as InstructionsVerifier,
    )
    from rlvr.verifiers import (
        IntervalVerifier as IntervalVerifier,
    )
    from rlvr.verifiers import (
        JsonSchemaVerifier as JsonSchemaVerifier,
    )
    from rlvr.verifiers import (
        KnightsAndKnavesVerifier as KnightsAndKnavesVerifier,
    )
    from rlvr.verifiers import (
        LabelVerifier as LabelVerifier,
    )
    from rlvr.verifiers import (
        MathVerifier as MathVerifier,
    )
    from rlvr.verifiers import (
        NumericVerifier as NumericVerifier,
    )
    from rlvr.verifiers import (
        PointVerifier as PointVerifier,
    )
    from rlvr.verifiers import (
        RankingVerifier as RankingVerifier,
    )
    from rlvr.verifiers import (
        RatingVerifier as RatingVerifier,
    )
    from rlvr.verifiers import (
        ReasoningGymVerifier as ReasoningGymVerifier,
    )
    from rlvr.verifiers import (
        RegexVerifier as RegexVerifier,
    )
    from rlvr.verifiers import (
        RougeVerifier as RougeVerifier,
    )
    from rlvr.verifiers import (
        SudokuVerifier as SudokuVerifier,
    )
    from rlvr.verifiers import (
        TokenF1Verifier as TokenF1Verifier,
    )
    from rlvr.verifiers import (
        ToolCallVerifier as ToolCallVerifier,
    )
    from rlvr.verifiers import (
        Verifier as Verifier,
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
