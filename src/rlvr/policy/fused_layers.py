"""Liger-Kernel's Triton kernels for the norms, rotary embedding and gated feed-forward layers of a model.

Fewer launches and fewer bytes than the stock modules, which compute each of these by several operations; the parameters
stay what they are. The kernels replace the `forward` of a model's own modules, and of rotary embedding the function of
its model file, which every model of the family in this process uses. In that file Liger replaces the classes of norms
and feed-forward layers too, so that models of the family that are made later have its kernels (linkedin/Liger-Kernel
ead96b6, src/liger_kernel/transformers/monkey_patch.py: `apply_liger_kernel_to_qwen3`). Its losses are left out: the LM
head is `rlvr.policy.fused_head`. Whether the model then still computes the same is tried on a few tokens.
"""

from __future__ import annotations

import inspect
import logging
from importlib.util import find_spec
from typing import Any, Literal

import torch

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.policy.model import Policy

KERNELS = ("rope", "rms_norm", "swiglu", "geglu")
"""Parameters of Liger's functions that name kernels for layers."""
# As for the trial of packed rows (`Policy.packing`): rounding is about 1e-7 in float32 and 4e-3 in bfloat16, and grows.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Difference of hidden states that is rounding, relative to the largest of them; four times as much of gradients."""
TRIED = 4
"""Trained parameters whose gradients are compared: the smallest, among them a layer's norms or an adapter's factors."""
logger = logging.getLogger(__name__)


def fuse_layers(policy: Policy, asked: Literal["auto"] | bool) -> None:
    """Put Liger's kernels into the policy's layers, as `model.fused_layers` asks.

    `auto`: on a GPU, where liger-kernel is installed and has kernels for the model. ConfigError where they are asked
    for and cannot be had, and where the model computes something else with them.
    """
    if asked is False:
        return
    obstacle = _obstacle(policy)
    if obstacle:
        if asked is True:
            raise ConfigError(f"model.fused_layers: true, but {obstacle}")
        return
    before = _trial(policy)
    names = _apply(policy.causal_lm)
    after = _trial(policy)
    logger.info("layers use Liger's kernels: %s", ", ".join(names))
    if before is None or after is None:
        return
    for what, own, new, tolerance in (
        ("hidden states", before[0], after[0], TOLERANCE[policy.dtype]),
        ("gradients", before[1], after[1], 4 * TOLERANCE[policy.dtype]),
    ):
        # A gradient may be 0 throughout, where an adapter begins with a factor of 0.
        largest = max(float(own.abs().max()), torch.finfo(own.dtype).tiny)
        difference = float((new - own).abs().max()) / largest
        if not difference <= tolerance:
            raise ConfigError(
                f"with Liger's kernels ({', '.join(names)}) the model's {what} differ by {difference:.1e} of the "
                "largest from its own: set model.fused_layers: false"
            )


def _obstacle(policy: Policy) -> str:
    """The reason why there are no kernels for the policy; empty where there are."""
    if find_spec("liger_kernel") is None:
        return f"liger-kernel is not installed: {install_command('liger')}"
    if policy.home.type != "cuda":
        return "the model is on a CPU, where Liger's kernels do not run"
    if _function(policy.causal_lm) is None:
        return f"Liger has no kernels for models of type {policy.causal_lm.config.model_type!r}"
    return ""


def _function(causal_lm: Any) -> Any:
    """Liger's function for a type of model; None where it has none."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(causal_lm.config.model_type)


def _apply(causal_lm: Any) -> list[str]:
    """Put the kernels in, and return their names."""
    apply = _function(causal_lm)
    parameters = inspect.signature(apply).parameters
    # What Liger itself leaves out for a family stays out (rotary embedding of GLM-4, for one).
    names = [name for name in KERNELS if name in parameters and parameters[name].default is True]
    losses = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in parameters}
    apply(model=causal_lm, **dict.fromkeys(names, True), **losses)
    return names


def _trial(policy: Policy) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Hidden states [2, 8, H] of a few tokens, and gradients [N] of a number made of them, laid end to end.

    None where the weights are not on their device yet.
    """
    device = policy.device
    if device.type != policy.home.type:
        return None
    ids = torch.arange(16, device=device).view(2, 8) % policy.causal_lm.config.get_text_config().vocab_size
    with torch.enable_grad(), policy.evaluating():
        hidden = policy.hidden_states(ids, torch.arange(8, device=device).expand(2, -1)).float()
        # Not a sum: an RMS norm makes the sum of squares of a token a constant.
        total = (hidden * torch.linspace(-1, 1, hidden.shape[-1], device=device)).sum()
        tried = sorted(policy.trainable().values(), key=lambda parameter: parameter.numel())[:TRIED]
        gradients = torch.autograd.grad(total, tried, allow_unused=True) if tried else ()
    flat = [gradient.float().flatten() for gradient in gradients if gradient is not None]
    return hidden.detach(), torch.cat([total.new_zeros(1), *flat])
