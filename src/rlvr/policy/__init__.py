"""The policy: loading and building models, adapters, micro-batches, statistics of a forward pass, optimisers."""

from rlvr.policy.loading import given_policy, load_policy, make_policy
from rlvr.policy.microbatch import Cost, MicroBatch, check_packing, micro_batches, rows_of
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
    "forward",
    "given_policy",
    "load_policy",
    "make_policy",
    "micro_batches",
    "rows_of",
    "sgd",
]
