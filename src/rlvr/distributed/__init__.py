"""Placement of weights and optimizer: ranks, backends, named weights for engines, checkpoints."""

from rlvr.distributed.backend import Backend, BackendFactory
from rlvr.distributed.deepspeed import DeepSpeedOptions
from rlvr.distributed.plain import PlainBackend
from rlvr.distributed.world import World

__all__ = [
    "Backend",
    "BackendFactory",
    "DeepSpeedOptions",
    "PlainBackend",
    "World",
]
