"""The policy: loading and building models, adapters, micro-batches, statistics of a forward pass, optimisers."""

from rlvr.policy.load_balancing import deal
from rlvr.policy.loading import device_of, dtype_of, given_policy, load_policy, make_policy, tokenizer_of
from rlvr.policy.microbatch import Cost, MicroBatch, check_packing, cut, micro_batches, rows_of
from rlvr.policy.model import Policy
from rlvr.policy.optimizers import adamw, sgd
from rlvr.policy.snapshot import Snapshot
from rlvr.policy.statistics import forward

__all__ = [
    "Cost",
    "MicroBatch",
    "Policy",
    "Snapshot",
    "adamw",
    "check_packing",
    "cut",
    "deal",
    "device_of",
    "dtype_of",
    "forward",
    "given_policy",
    "load_policy",
    "make_policy",
    "micro_batches",
    "rows_of",
    "sgd",
    "tokenizer_of",
]
