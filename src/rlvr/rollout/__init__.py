"""Rollouts: engines that sample, plans that say what a group is made of, and the collector that runs them."""

import warnings
from typing import Any

from rlvr.rollout.buffer import Collected, Collector, Interrupted, RolloutBuffer
from rlvr.rollout.context import Activity, RolloutContext
from rlvr.rollout.engine import Bucket, Completion, Engine, Published, Request, Sampling
from rlvr.rollout.hf import HFEngine, HFEngineOptions
from rlvr.rollout.plans import (
    Draw,
    Plan,
    answer_characters,
    evaluation_plan,
    make_rollout,
    side_by_side,
    single_turn,
)
from rlvr.rollout.probe import probe
from rlvr.rollout.recorded import RecordedOptions
from rlvr.rollout.turns import Turns
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions

__all__ = [
    "Activity",
    "Bucket",
    "Collected",
    "Collector",
    "Completion",
    "Draw",
    "Engine",
    "HFEngine",
    "HFEngineOptions",
    "Interrupted",
    "Plan",
    "Published",
    "RecordedOptions",
    "Request",
    "RolloutBuffer",
    "RolloutContext",
    "Sampling",
    "Turns",
    "VLLMOptions",
    "VLLMServerOptions",
    "answer_characters",
    "evaluation_plan",
    "make_rollout",
    "probe",
    "side_by_side",
    "single_turn",
]


_RENAMED: dict[str, Any] = {"Means": RolloutContext, "Supply": RolloutBuffer}
"""Public names of the version before."""


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = f"rlvr.rollout.{name} is now rlvr.rollout.{_RENAMED[name].__name__}: the old name goes with the next version"
    warnings.warn(text, FutureWarning, stacklevel=2)
    return _RENAMED[name]
