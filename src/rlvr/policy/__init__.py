"""The policy: loading and building models, adapters, micro-batches, statistics of a forward pass, optimisers."""

from rlvr.core.moved import renamed
from rlvr.policy.loading import given_policy, load_policy, make_policy
from rlvr.policy.microbatch import Cost, MicroBatch, check_packing, micro_batches, rows_of
from rlvr.policy.model import Policy
from rlvr.policy.optimizers import adamw, sgd
from rlvr.policy.snapshot import Snapshot
from rlvr.policy.statistics import forward

__getattr__ = renamed(__name__, {"learning_rate": "rlvr.stages.stage_base.learning_rate"})
