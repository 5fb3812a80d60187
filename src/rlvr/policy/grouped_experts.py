"""The experts of a mixture in the type that is computed in, where transformers multiplies them as groups.

torch's autocast has no rule for `torch.nn.functional.grouped_mm`, and transformers casts its inputs to the type of the
weights (integrations/moe.py, `_grouped_mm`). So the experts, which do most of a mixture's multiplications, would be
computed in float32 where their weights are kept in it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

GROUPED = "grouped_mm"
NAME = f"rlvr_{GROUPED}"


def autocast_experts(model: Any) -> None:
    """Let autocast hold for the grouped products of `model`. A model without experts, or with another implementation
    of them, stays as it is."""
    if model.config.get_text_config()._experts_implementation == GROUPED:
        ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
        model.set_experts_implementation(NAME)


def _experts(module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts' output [T, H] for hidden states [T, H], the numbers of each token's experts [T, K] and their weights
    [T, K]."""
    kind = hidden_states.device.type
    if not torch.is_autocast_enabled(kind):
        return grouped_mm_experts_forward(module, hidden_states, chosen, weights)
    dtype = torch.get_autocast_dtype(kind)
    cast: Any = _Cast(module, dtype)
    output = grouped_mm_experts_forward(cast, hidden_states.to(dtype), chosen, weights)
    return output.to(hidden_states.dtype)


class _Cast:
    """A module whose parameters are read in `dtype`; gradients reach the parameters themselves."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
