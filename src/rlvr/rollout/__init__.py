"""Rollouts: engines that sample, plans that say what a group is made of, and the collector that runs them."""

from rlvr.rollout.collector import Collector, Interrupted, Timing
from rlvr.rollout.engine import Bucket, Completion, Engine, Request, Sampling
from rlvr.rollout.hf import HFEngine, HFEngineOptions
from rlvr.rollout.plans import Draw, Means, Plan, make_rollout, single_turn
from rlvr.rollout.probe import probe

__all__ = [
    "Bucket",
    "Collector",
    "Completion",
    "Draw",
    "Engine",
    "HFEngine",
    "HFEngineOptions",
    "Interrupted",
    "Means",
    "Plan",
    "Request",
    "Sampling",
    "Timing",
    "make_rollout",
    "probe",
    "single_turn",
]
