"""Placement of weights and optimizer: ranks, backends, named weights for engines, checkpoints."""

from rlvr.distributed.backend import Backend, BackendFactory
from rlvr.distributed.deepspeed import DeepSpeedOptions
from rlvr.distributed.plain import PlainBackend, PlainOptions
from rlvr.distributed.world import World
from rlvr.rollout.weights import buckets, named_weights

__all__ = [
    "Backend",
    "BackendFactory",
    "DeepSpeedOptions",
    "PlainBackend",
    "PlainOptions",
    "World",
    "buckets",
    "named_weights",
]
