"""Where weights and optimizer live: backends, named weights for engines, checkpoints."""

from rlvr.distributed.backend import Backend
from rlvr.distributed.plain import PlainBackend, PlainOptions
from rlvr.distributed.weights import buckets, named_weights

__all__ = ["Backend", "PlainBackend", "PlainOptions", "buckets", "named_weights"]
