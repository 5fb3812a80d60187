"""Weights into parts, one at a time, before DeepSpeed has seen the model: under ZeRO-3 no device ever holds all of
them.

The model waits in host memory, with its weights on rank 0; the other ranks have their shapes only. Each parameter goes
to the device whole, is given to all ranks by rank 0, and is cut before the next one comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlvr.distributed.world import World, check_versions
from rlvr.policy import Policy
from rlvr.policy.attention import Packing, hook


def partition(policy: Policy, world: World, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cut the policy's parameters into parts of `dtype`, those of rank 0 for all, in place.

    Gives, on every rank alike, copies in host memory of the weights that train and that `dtype` changes.
    """
    check_versions(world)
    # A digest in place of the names: ranks with another model would else wait in a broadcast of another size.
    named = "\n".join(f"{name} {tuple(p.shape)}" for name, p in policy.model.named_parameters())
    world.same(hashlib.sha256(named.encode()).hexdigest(), "the model's parameters by name and shape")
    tried = world.broadcast(_tried(policy) if world.is_main else None, "what the model was found to compute")
    policy.head_is_enough, policy.packing = tried  # type: ignore[misc]  # nothing can be tried on the parts
    if policy.packing.shares and not world.is_main:
        hook(policy.causal_lm)
    for module in policy.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _from_first(buffer, policy, world)
    # Before the cutting: afterwards no rank has a whole weight to compare.
    unrounded = _unrounded(policy, world, dtype)
    import deepspeed

    deepspeed.init_distributed(dist_init_required=False)  # its own name for the process group that there is
    convert: Any = None
    for parameter in policy.model.parameters():
        if parameter.is_floating_point():
            kind = dtype
        else:
            kind = parameter.dtype
        parameter.data = _here(parameter.data, kind, policy, world)
        # deepspeed.zero.Init puts its methods on the parameters of a module; a list of one parameter gives the function
        # that cuts, which then serves for all.
        if convert is None:
            deepspeed.zero.Init(module=torch.nn.ParameterList([parameter]), config_dict_or_path=config)
            convert = parameter.convert_to_zero_parameters
        else:
            convert(param_list=[parameter])
    return unrounded


def _tried(policy: Policy) -> tuple[bool, Packing]:
    """The trials of Policy, made on the whole model in host memory, where some attention cannot be computed."""
    model = policy.causal_lm
    kind = str(model.config._attn_implementation)
    if policy.device == policy.home or not kind.startswith("flash_attention"):
        return policy.head_is_enough, policy.packing
    model.set_attn_implementation("sdpa")
    head = policy.head_is_enough
    model.set_attn_implementation(kind)
    return head, Packing(False, False, f"{kind} could not be tried in host memory, where the model waits for ZeRO-3")


def _unrounded(policy: Policy, world: World, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weights = policy.trainable()
    names = world.broadcast(changed_by(dtype, weights) if world.is_main else [], "the weights that are rounded")
    return {name: _from_first(weights[name].detach(), policy, world).to("cpu", copy=True) for name in names}


def changed_by(dtype: torch.dtype, weights: Mapping[str, torch.nn.Parameter]) -> list[str]:
    """The names of the weights that are something else when they are rounded to `dtype`."""
    plain = {name: weight.detach() for name, weight in weights.items() if weight.dtype != dtype}
    return [name for name, w in plain.items() if not torch.equal(w, w.to(dtype).to(w.dtype))]


def _from_first(tensor: torch.Tensor, policy: Policy, world: World) -> torch.Tensor:
    """Rank 0's `tensor`, on the device that is computed on."""
    here = _here(tensor, tensor.dtype, policy, world)
    if world.size > 1:
        dist.broadcast(here, src=0)
    return here


def _here(tensor: torch.Tensor, dtype: torch.dtype, policy: Policy, world: World) -> torch.Tensor:
    """On the device that is computed on: rank 0's `tensor`, and empty memory for it elsewhere."""
    if world.is_main:
        return tensor.to(policy.home, dtype)
    return torch.empty(tensor.shape, dtype=dtype, device=policy.home)
