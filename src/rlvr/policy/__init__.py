"""The policy: loading and building models, adapters, micro-batches, statistics of a forward pass, optimisers."""

from rlvr.policy.loading import device_of, dtype_of, load_policy, make_policy, tokenizer_of
from rlvr.policy.microbatch import MicroBatch, cut, rows_of
from rlvr.policy.model import Policy
from rlvr.policy.optimizers import adamw, learning_rate, sgd
from rlvr.policy.snapshot import Snapshot
from rlvr.policy.statistics import forward

__all__ = [
    "MicroBatch",
    "Policy",
    "Snapshot",
    "adamw",
    "cut",
    "device_of",
    "dtype_of",
    "forward",
    "learning_rate",
    "load_policy",
    "make_policy",
    "rows_of",
    "sgd",
    "tokenizer_of",
]
