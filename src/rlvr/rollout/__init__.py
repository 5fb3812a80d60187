"""Rollouts: engines that sample, plans that say what a group is made of, and the collector that runs them."""

from rlvr.rollout.buffer import CollectionInterruptedError, Collector, RolloutBuffer, StepRollouts
from rlvr.rollout.engine import Bucket, Completion, Engine, Published, Request, Sampling
from rlvr.rollout.hf import HFEngine, HFEngineOptions
from rlvr.rollout.plans import (
    Activity,
    Draw,
    RolloutContext,
    RolloutPlan,
    RolloutTokens,
    evaluation_plan,
    make_rollout,
    side_by_side,
    single_turn,
)
from rlvr.rollout.probe import probe
from rlvr.rollout.recorded_rollouts import RecordedOptions
from rlvr.rollout.turns import Turns
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions

__all__ = [
    "Activity",
    "Bucket",
    "CollectionInterruptedError",
    "Collector",
    "Completion",
    "Draw",
    "Engine",
    "HFEngine",
    "HFEngineOptions",
    "Published",
    "RecordedOptions",
    "Request",
    "RolloutBuffer",
    "RolloutContext",
    "RolloutPlan",
    "RolloutTokens",
    "Sampling",
    "StepRollouts",
    "Turns",
    "VLLMOptions",
    "VLLMServerOptions",
    "evaluation_plan",
    "make_rollout",
    "probe",
    "side_by_side",
    "single_turn",
]
