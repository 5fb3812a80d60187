"""The LM head taken apart: tensors from which logits can be computed a tile at a time, without calling the module.

logits = cap(scale x sum over terms of input_i @ weight_i.T), where a plain head is one term, a bias another of width 1, and
a LoRA adapter a third of width r, so that its low rank stays low. A head that is anything else (quantised, hooked, another
adapter) is not taken apart; the caller then has to call it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rlvr.policy.model import Policy

PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""Types of a weight that can be multiplied a slice at a time; others are quantised. A fake tensor is a shape without contents, of
which a pass is planned."""


@dataclass(frozen=True)
class Head:
    """Where the logits [T, V] of T tokens come from: `inputs` [T, H_i] and `weights` [V, H_i], one of each per term.

    Without weights the one input is the logits themselves.
    """

    inputs: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...] = ()
    scale: float = 1.0
    """What logits are multiplied by."""
    cap: float | None = None
    """Soft-cap, after the scale: cap x tanh(logits / cap)."""

    @property
    def tokens(self) -> int:
        """T"""
        return self.inputs[0].shape[0]

    @property
    def vocabulary(self) -> int:
        """V: the rows of the head, those beyond the tokenizer included. Of a partitioned head only while it is gathered."""
        return self.weights[0].shape[0] if self.weights else self.inputs[0].shape[1]


def head_of(policy: Policy, hidden: torch.Tensor) -> Head | None:
    """The policy's head on hidden states [T, H]; None where it cannot be taken apart."""
    module = policy.causal_lm.get_output_embeddings()
    weight = getattr(module, "weight", None)
    dtype = policy.dtype if policy.dtype != torch.float32 or weight is None else weight.dtype
    with torch.autocast(policy.device.type, policy.dtype, enabled=policy.dtype != torch.float32):
        terms = _lora(module, hidden, dtype) if policy.has_adapter else _linear(module, hidden, dtype)
    if terms is None:
        return None
    config = policy.causal_lm.config.get_text_config()
    scale = _or(getattr(config, "logit_scale", None), 1.0) / _or(getattr(config, "logits_scaling", None), 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    inputs, weights = zip(*terms, strict=True)
    return Head(inputs, weights, scale, cap)


@contextlib.contextmanager
def gathered(weights: Iterable[torch.Tensor], written: bool = False) -> Iterator[None]:
    """Inside, weights that DeepSpeed ZeRO-3 has partitioned are whole. Every rank has to come here equally often.

    With `written`, what rank 0 writes into them inside is kept, by all ranks.
    """
    partitioned: dict[int, Any] = {weight.ds_id: weight for weight in weights if hasattr(weight, "ds_id")}
    if not partitioned:
        yield
        return
    import deepspeed

    ordered = [partitioned[key] for key in sorted(partitioned)]
    for weight in ordered:  # it may be on its way to a module that shares it
        under_way = weight._z3_optimizer.parameter_offload.module.ds_inflight_param_registry
        if (fetch := under_way.pop(weight, None)) is not None:
            fetch.wait()
    if written:
        with deepspeed.zero.GatheredParameters(ordered, modifier_rank=0):
            yield
        return
    absent = [weight for weight in ordered if weight.ds_status.name == "NOT_AVAILABLE"]
    if absent:
        absent[0].all_gather(param_list=absent)
    try:
        yield
    finally:  # what a module has come to use meanwhile is released with that module
        if idle := [weight for weight in absent if not weight.ds_active_sub_modules]:
            idle[0].partition(param_list=idle)


def gather_until_backward_ends(weights: Iterable[torch.Tensor]) -> None:
    """`gathered` from here, inside a backward pass, to its end.

    A gradient can be accumulated only in a parameter that is whole, and a tied one's comes together last; autograd brings it
    there and DeepSpeed's hook takes it.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(gathered(weights))
    torch.autograd.Variable._execution_engine.queue_callback(stack.close)


_Terms = list[tuple[torch.Tensor, torch.Tensor]]


def _linear(module: Any, hidden: torch.Tensor, dtype: torch.dtype) -> _Terms | None:
    """The terms of a plain `nn.Linear` that nothing was hooked to but DeepSpeed, whose hooks only gather the weight."""
    plain = getattr(type(module), "forward", None) is nn.Linear.forward and "forward" not in vars(module)
    if not plain or type(module.weight) not in PLAIN:
        return None
    if (module._forward_hooks or module._forward_pre_hooks) and not hasattr(module.weight, "ds_id"):
        return None
    terms = [(hidden.to(dtype), module.weight)]
    if module.bias is not None:
        terms.append((hidden.new_ones(len(hidden), 1, dtype=dtype), module.bias[:, None]))
    return terms


def _lora(module: Any, hidden: torch.Tensor, dtype: torch.dtype) -> _Terms | None:
    """The terms of a head under peft, with or without plain LoRA matrices of its own."""
    from peft.tuners.lora import Linear as LoraLinear

    if type(module) is not LoraLinear:
        return _linear(module, hidden, dtype)
    if not torch.is_autocast_enabled(hidden.device.type):
        dtype = getattr(module.base_layer.weight, "dtype", dtype)
    terms = _linear(module.base_layer, hidden, dtype)
    if terms is None or module.disable_adapters or module.merged or module.fan_in_fan_out:
        return terms if terms is not None and module.merged and not module.disable_adapters else None
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down, up = module.lora_A[name], module.lora_B[name]
        if name in module.lora_variant or up.bias is not None:
            return None
        low_rank = down(module.lora_dropout[name](hidden.to(down.weight.dtype))) * module.scaling[name]
        terms.append((low_rank.to(dtype), up.weight))
    return terms


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
