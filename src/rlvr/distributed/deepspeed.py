"""The DeepSpeed backend: ZeRO 1, 2 and 3 over the ranks, with or without offload to host memory.

`deepspeed.initialize` wraps the policy's model in place; passes go through the model itself, whose hooks DeepSpeed
sets, and never through the engine's own forward. Invariants:
- The gradient of a step is the sum over ranks and micro-batches: DeepSpeed's average is undone, its division by
  accumulation steps is off, sums are float32.
- A step begins with `zero` and ends with `step`: gradients of passes that no step followed are gone.
- The state that is saved is whole tensors (rlvr.distributed.shares); DeepSpeed's own checkpoints are not used.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlvr import registry
from rlvr.core.device_memory import HostOffload, free_cached
from rlvr.core.extras import install_command
from rlvr.core.specs import ComponentSpec, SpecLike
from rlvr.distributed.backend import BackendFactory
from rlvr.distributed.plain import share_from_first
from rlvr.distributed.shares import OPTIMIZER, WEIGHTS, check_weights, optimizer_keys, owners
from rlvr.distributed.world import World
from rlvr.distributed.zero_config import Offload, zero_config
from rlvr.distributed.zero_loading import changed_by, partition
from rlvr.distributed.zero_shards import Shards
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.registry import register
from rlvr.rollout.engine import Bucket
from rlvr.rollout.weights import weight_buckets, whole_shape, whole_size

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import, which saving a Hugging Face model causes, warns

# Weak, so that the backend goes with its policy.
_open: weakref.WeakKeyDictionary[Policy, DeepSpeedBackend] = weakref.WeakKeyDictionary()
"""The backend of each policy: a model is wrapped once, and stages after the first go on with its engine."""


@register("backend", "deepspeed")
@dataclass(frozen=True)
class DeepSpeedOptions(BackendFactory):
    """Options of the DeepSpeed backend; in a configuration they are keys of `distributed`."""

    zero_stage: int = 2
    """ZeRO stage, which says what is partitioned among the ranks. 1: the optimizer's state; 2: gradients too; 3:
    weights too."""
    offload: Offload = "none"
    """Tensors kept in host memory. optimizer: its state and the float32 weights; parameters: these and the weights
    (ZeRO-3); none."""
    offload_during_rollout: bool = False
    """Keep the optimizer's state and the float32 weights that are not computed with in host memory from a publish of
    weights to the next optimizer step."""
    deepspeed: str | None = None
    """A JSON file with more of DeepSpeed's own configuration."""

    @property
    def partitions(self) -> bool:
        """Return True if a rank alone has not all weights, so that no rank can compute or sample with them by
        itself."""
        return self.zero_stage == 3

    def open(self, policy: Policy, optimizer: SpecLike, world: World | None = None) -> DeepSpeedBackend:
        """The backend for `policy`, with a fresh optimizer."""
        # A later stage: `world` and the options are those of the first, since they are of the run.
        if policy in _open:
            _open[policy].renew(optimizer)
        else:
            _open[policy] = DeepSpeedBackend(policy, optimizer, world, self)
        return _open[policy]


class DeepSpeedBackend:
    """See rlvr.distributed.backend.Backend."""

    saves_copies = True

    def __init__(
        self,
        policy: Policy,
        optimizer: SpecLike = "adamw",
        world: World | None = None,
        options: DeepSpeedOptions | None = None,
    ) -> None:
        options = options or DeepSpeedOptions()
        deepspeed = _library()
        self._check(optimizer, options)
        self.policy = policy
        self.world = world or World()
        self.stage = options.zero_stage
        self.lockstep = options.zero_stage >= 2
        self.parameters = policy.trainable()
        config = zero_config(
            options.zero_stage,
            options.offload,
            policy.dtype == torch.bfloat16,
            self.world.size,
            options.deepspeed,
            sum(p.numel() for p in self.parameters.values()),
        )
        # Before the weights are cut or flattened: decay goes to matrices and not to norms and biases, told apart by
        # their shapes (docs/log.md, "loading a model in parts").
        base = registry.build("optimizer", optimizer)(self.parameters.values())  # groups them by their shapes
        _join_alone()
        if self.stage == 3:
            before = partition(policy, self.world, config, policy.dtype)
        else:
            self._tried = policy.head_is_enough, policy.packing  # on the plain model, before it is wrapped
            share_from_first(policy.model, self.world)
            # Copies, in host memory, of the weights that bfloat16 would change.
            if policy.dtype == torch.bfloat16:
                changed = changed_by(policy.dtype, self.parameters)
            else:
                changed = []
            before = {name: self.parameters[name].detach().to("cpu", copy=True) for name in changed}
        # dist_init_required=False: World has made the process group, with gloo for the CPU and a timeout.
        self.engine, *_ = deepspeed.initialize(
            model=policy.model, optimizer=base, config=config, dist_init_required=False
        )
        self.optimizer = self.engine.optimizer
        self.offload_during_rollout = options.offload_during_rollout
        self.offload = HostOffload(policy.home)
        self.shards = Shards(self.optimizer, self.parameters, self.offload)
        self._passes = 0
        """Backward passes since `zero`."""
        for name, weight in before.items():  # the float32 weights start from what was loaded, not from its rounding
            self.shards.set_weight(name, weight)
        if self.stage == 3 and policy.head_is_enough:
            # runtime/zero/parameter_offload.py (0.19.8) sets this hook on the outermost module, which the learner does
            # not call where it needs hidden states only; prepended, so that it runs before the hooks that fetch
            # weights.
            policy.causal_lm.base_model.register_forward_pre_hook(self._begin_pass, prepend=True)

    @staticmethod
    def _check(optimizer: SpecLike, options: DeepSpeedOptions) -> None:
        if options.zero_stage not in (1, 2, 3):
            raise ConfigError(f"distributed.zero_stage is {options.zero_stage}: there are 1, 2 and 3")
        if options.offload == "parameters" and options.zero_stage != 3:
            raise ConfigError("distributed.offload: parameters needs zero_stage 3, which alone shares them out")
        if options.offload != "none" and options.offload_during_rollout:
            raise ConfigError(
                f"distributed.offload {options.offload} keeps in host memory all the time what "
                "distributed.offload_during_rollout would move there and back: set one of them"
            )
        if ComponentSpec.parse(optimizer).name == "adamw_8bit":
            raise ConfigError(
                "optim.optimizer adamw_8bit does not go with distributed.backend deepspeed, whose state is flat and "
                "shared out: use adamw, with offload where memory is short"
            )

    def _begin_pass(self, *_: Any) -> None:
        """Begin a pass, as the engine's forward would for the fetching of partitioned weights."""
        self.optimizer.parameter_offload.get_param_coordinator().reset_step()

    def renew(self, optimizer: SpecLike) -> None:
        """A fresh optimizer on the weights as they are. ConfigError where it is of another kind than the one before."""
        # Shapes without memory: only the groups and options of the new optimizer are wanted.
        model = [torch.nn.Parameter(torch.empty(whole_shape(p), device="meta")) for p in self.parameters.values()]
        new = registry.build("optimizer", optimizer)(model)
        base = self.optimizer.optimizer
        if type(new) is not type(base) or len(new.param_groups) != len(base.param_groups):
            raise ConfigError(
                "with distributed.backend deepspeed all stages use one kind of optim.optimizer: "
                f"a stage asks for {type(new).__name__} after {type(base).__name__}"
            )
        for mine, wanted in zip(base.param_groups, new.param_groups, strict=True):
            # `fused` and `foreach` follow the device of the parameters, which are on "meta" here.
            mine.update({key: value for key, value in wanted.items() if key not in ("params", "fused", "foreach")})
        self.offload.move_back()
        self.shards.forget()

    # a step

    def zero(self) -> None:
        """See the protocol."""
        # Until `step`, or every backward pass would reduce and count as the last of its step.
        self.engine.set_gradient_accumulation_boundary(False)
        self.shards.drop_gradients()
        self._passes = 0

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        self._passes += 1
        # Both are what the engine's own `forward` and backward do around a pass; it is not called here, so its counters
        # of hooks and of micro-steps are set by hand (runtime/base_optimizer.py).
        self.optimizer.clear_backward_seen_flag()
        self.optimizer.backward_prologue()
        # DeepSpeed averages gradients over ranks: times the number of ranks, the average is the sum.
        # scale_wrt_gas=False: it does not divide by accumulation steps either.
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self, lr: float, max_norm: float) -> float:
        """Sum over ranks, clip and step; see the protocol."""
        self.world.barrier("the optimizer step")
        self.offload.move_back()  # not before, so that backward passes have its memory
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Read by the optimizer at each step (unscale_and_clip_grads), so a schedule of max_grad_norm works too.
        self.optimizer.clip_grad = max_norm
        self.engine.set_gradient_accumulation_boundary(True)
        # This rank had no rollout of the step. The reduction and the step are collective and read what a pass leaves.
        if not self._passes:
            self.shards.no_gradients()
        # ZeRO-1 keeps whole gradients and reduces them once for each step; 2 and 3 reduce in each backward pass.
        elif self.stage == 1:
            self.engine.allreduce_gradients()
        else:
            self.optimizer.finalize_gradient_accumulation_boundary()
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        # False where a gradient was not finite: DeepSpeed skipped the step on every rank.
        if self.engine.was_step_applied():
            return norm
        return math.nan

    # weights

    def release(self) -> None:
        """See the protocol. On a CPU gradients stay, unless what the optimizer reads goes too."""
        if self.offload_during_rollout or self.policy.home.type == "cuda":
            self.shards.free_gradients()
        if self.offload_during_rollout:
            self.offload.move_out(self.shards.for_steps_alone())
        free_cached(self.policy.home)

    def named_weights(self) -> Iterator[Bucket]:
        """See the protocol."""
        return weight_buckets(self.policy)

    # state

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """See the protocol. Tensors are put together one at a time, in host memory of the rank that keeps them."""
        owner = owners({name: whole_size(p) for name, p in self.parameters.items()}, self.world.size)
        tensors: dict[str, torch.Tensor] = {}
        for name in self.parameters:
            for key, tensor in self.shards.of(name, keep=owner[name] == self.world.rank):
                if tensor is not None:
                    tensors[f"{WEIGHTS}{name}" if key is None else f"{OPTIMIZER}{key}/{name}"] = tensor
        return tensors

    def load_tensors(self, saved: Mapping[str, torch.Tensor]) -> None:
        """See the protocol. Tensors are read one at a time, on every rank."""
        check_weights(saved, {name: whole_shape(p) for name, p in self.parameters.items()})
        self.offload.move_back()
        self.shards.forget()
        keys = optimizer_keys(saved)
        for name in self.parameters:
            self.shards.set_weight(name, saved[WEIGHTS + name])
            for key in keys:
                if (full := f"{OPTIMIZER}{key}/{name}") in saved:
                    self.shards.set_state(name, key, saved[full])
        # Once, after all weights: under ZeRO-3 it is a pass over all groups.
        self.shards.publish()


def _library() -> Any:
    """deepspeed, quiet, and without what it would compile."""
    try:
        import deepspeed
        from deepspeed.utils import logger
    except ImportError as error:
        raise ConfigError(
            f"distributed.backend deepspeed needs DeepSpeed: {install_command('deepspeed')}, or use backend plain"
        ) from error
    if not logging.getLogger("rlvr").isEnabledFor(logging.DEBUG):
        # At INFO it prints its whole configuration at every start.
        logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # a CPU all-reduce that it would build with a compiler
    )
    return deepspeed


def _join_alone() -> None:
    """A process group of one, where no launcher made one."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it, also where it did not make the process group
    if not dist.is_initialized():
        store = dist.HashStore()
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
        else:
            backend = "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
