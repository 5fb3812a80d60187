"""Where weights and optimizer live: ranks, backends, named weights for engines, checkpoints."""

from rlvr.distributed.backend import Backend
from rlvr.distributed.deepspeed import DeepSpeedOptions
from rlvr.distributed.plain import PlainBackend, PlainOptions
from rlvr.distributed.weights import buckets, named_weights
from rlvr.distributed.world import World

__all__ = ["Backend", "DeepSpeedOptions", "PlainBackend", "PlainOptions", "World", "buckets", "named_weights"]
