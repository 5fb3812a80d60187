"""The plain backend: every rank holds the whole model and optimizer; with several ranks, data parallel.

It is the oracle of the DeepSpeed backend. Invariants: all ranks start from rank 0's weights and keep the same bits,
because they take the same step on the same summed gradients; frozen parameters are neither summed nor changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlvr import registry
from rlvr.core.device_memory import HostOffload, free_cached, record_event
from rlvr.core.specs import SpecLike
from rlvr.distributed.backend import BackendFactory
from rlvr.distributed.shares import OPTIMIZER, WEIGHTS, check_weights, optimizer_keys, owners
from rlvr.distributed.world import World, check_versions
from rlvr.policy import Policy
from rlvr.registry import register
from rlvr.rollout.engine import Bucket
from rlvr.rollout.weights import buckets, weight_buckets

# Arbitrary: this much is copied beside the gradients; fewer and larger all-reduces gain nothing once a link is full.
REDUCE_BYTES = 64 << 20
"""Gradients that are summed over ranks at once."""


@register("backend", "plain")
@dataclass(frozen=True)
class PlainOptions(BackendFactory):
    """Options of the plain backend; in a configuration they are keys of `distributed`."""

    offload_during_rollout: bool = False
    """Keep the optimizer's state in host memory from a publish of weights to the next optimizer step."""

    def open(self, policy: Policy, optimizer: SpecLike, world: World | None = None) -> PlainBackend:
        """The backend for `policy`."""
        return PlainBackend(policy, optimizer, world, self.offload_during_rollout)


class PlainBackend:
    """See rlvr.distributed.backend.Backend."""

    lockstep = False
    saves_copies = False

    def __init__(
        self,
        policy: Policy,
        optimizer: SpecLike = "adamw",
        world: World | None = None,
        offload_during_rollout: bool = False,
    ) -> None:
        self.policy = policy
        self.world = world or World()
        self.parameters = policy.trainable()
        self.optimizer = registry.build("optimizer", optimizer)(self.parameters.values())
        self.offload_during_rollout = offload_during_rollout
        self.offload = HostOffload(policy.home)
        share_from_first(policy.model, self.world)

    def zero(self) -> None:
        """Zero gradients, not absent ones, so that a step whose rollouts were all skipped still moves by its
        momentum."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                # torch's optimizers skip parameters whose gradient is None.
                parameter.grad = torch.zeros_like(parameter)
                record_event("trainer", "gradients", parameter.grad.nbytes)
            else:
                parameter.grad.zero_()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`."""
        loss.backward()

    def step(self, lr: float, max_norm: float) -> float:
        """Sum over ranks, clip and step; see the protocol."""
        # Sum, not average: losses are divided by counts over all ranks (`Denominators`). Before clipping, so that every
        # rank clips by the same norm.
        self._sum_gradients()
        self.offload.move_back()  # not before, so that backward passes have its memory
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))
        # The norm is the same on every rank, so all skip a step together.
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return norm

    def _sum_gradients(self) -> None:
        if self.world.size == 1:
            return
        what = "the sum of the gradients"
        # A named meeting first: all_reduce itself would wait 1800 s for a rank that is lost, without saying for whom.
        self.world.barrier(what)
        with self.world.naming(what):
            for part in _alike(p.grad for p in self.parameters.values() if p.grad is not None):
                flat = torch.cat([gradient.flatten() for gradient in part])
                # The order of addition depends on the ranks alone, so all have the same bits.
                dist.all_reduce(flat)
                torch._foreach_copy_(part, _cut(flat, part))

    def release(self) -> None:
        """See the protocol. On a CPU gradients stay: making them anew costs the time of touching their pages.

        The float32 weights stay too: they are those that the policy computes with, as it does for the probe after a
        publish.
        """
        if self.policy.home.type == "cuda":
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    record_event("trainer", "gradients", -parameter.grad.nbytes)
                parameter.grad = None
        if self.offload_during_rollout:
            self.offload.move_out(optimizer_tensors(self.optimizer))
        free_cached(self.policy.home)

    def named_weights(self) -> Iterator[Bucket]:
        """See the protocol."""
        return weight_buckets(self.policy)

    def saved_tensors(self) -> dict[str, torch.Tensor]:
        """See the protocol. The tensors are those in use, or their contents in host memory, not copies."""
        owner = owners({name: p.numel() for name, p in self.parameters.items()}, self.world.size)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            # All ranks have the same tensors; each writes a share, so that storage sees all their links.
            if owner[name] == self.world.rank:
                tensors[WEIGHTS + name] = parameter.detach()
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if value is not None:
                        tensors[f"{OPTIMIZER}{key}/{name}"] = self.offload.on_host(torch.as_tensor(value))
        return tensors

    def load_tensors(self, saved: Mapping[str, torch.Tensor]) -> None:
        """See the protocol."""
        check_weights(saved, {name: p.shape for name, p in self.parameters.items()})
        self.offload.move_back()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(saved[WEIGHTS + name])
        keys = optimizer_keys(saved)
        # torch's state_dict numbers parameters over its groups, which are not in the order of the model.
        names = {id(p): name for name, p in self.parameters.items()}
        ordered = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            i: {key: _number(saved[full]) for key in keys if (full := f"{OPTIMIZER}{key}/{name}") in saved}
            for i, name in enumerate(ordered)
        }
        groups = self.optimizer.state_dict()["param_groups"]
        # The groups are the current ones: learning rate and options are the configuration's, not the checkpoint's.
        self.optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of the optimizer's state, without its counts of steps, which are single numbers."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if torch.is_tensor(value) and value.ndim > 0]


def share_from_first(model: torch.nn.Module, world: World) -> None:
    """Give every rank rank 0's weights and buffers, in place. ConfigError where ranks run different versions of
    packages."""
    if world.size == 1:
        return
    # Before the first large exchange: two versions of torch may not even agree on its format.
    check_versions(world)
    world.barrier("rank 0's weights")
    with torch.no_grad():
        for part in _alike(t.detach() for t in [*model.parameters(), *model.buffers()]):
            flat = torch.cat([tensor.flatten() for tensor in part])
            # Flattened into one tensor per type and device, since each call costs its latency.
            dist.broadcast(flat, src=0)
            for tensor, new in zip(part, _cut(flat, part), strict=True):
                tensor.copy_(new)


def _alike(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists of at most REDUCE_BYTES, in each of one type and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        yield from buckets(kind, REDUCE_BYTES, lambda tensor: tensor.nbytes)


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """`flat` as tensors of the shapes of `like`."""
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def _number(value: torch.Tensor) -> Any:
    """A saved count as the int that it was; a copy of other values."""
    if value.ndim == 0 and value.dtype == torch.int64:
        return int(value)
    return value.clone()
