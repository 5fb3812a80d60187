"""The test that a model computes packed rows: not assumed from its name but tried, once, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvr.policy.attention import BASES, Spans, hook, unhook


@dataclass(frozen=True)
class Packing:
    """Packed rows that a model can compute, and the reason where it cannot."""

    packs: bool
    shares: bool
    reason: str = ""


def try_packing(model: Any, hidden_states: Callable[..., torch.Tensor], tolerance: float) -> Packing:
    """Hook `model` and compare a packed row with a shared prefix to the rows apart; where they differ, unhook it again.

    `hidden_states(input_ids, position_ids, spans)` runs the model; `tolerance` is relative to the largest of them.
    """
    config = model.config.get_text_config()
    base = model.config._attn_implementation or "none"
    special = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if special:
        return Packing(False, False, f"its layers are of type {', '.join(sorted(special))}")
    if base.startswith("flash_attention"):
        reason = f"model.attention {base} cannot share prefixes, sdpa and flex_attention can"
        return Packing(not _disagree(hidden_states, model, tolerance, shared=False), False, reason)
    if base not in BASES:
        return Packing(False, False, f"its attention is {base!r}, not one of {', '.join(BASES)}")
    hook(model)
    trouble = _disagree(hidden_states, model, tolerance, shared=True)
    if trouble:
        unhook(model)
    return Packing(not trouble, not trouble, trouble)


def _disagree(hidden_states: Callable[..., torch.Tensor], model: Any, tolerance: float, shared: bool) -> str:
    """Why a packed row of two short rollouts is not computed as they are apart; empty where it is."""
    weight = model.get_input_embeddings().weight
    device = weight.device
    # [10]: a shared prefix of 4 and two responses of 3. Any ids that differ would do; modulo the vocabulary they exist.
    ids = (torch.arange(10, device=device) * 7 + 3) % weight.shape[0]
    apart = torch.stack([torch.cat([ids[:4], ids[4:7]]), torch.cat([ids[:4], ids[7:]])])
    steps = torch.arange(7, device=device)
    if shared:
        # Runs 1 and 2 have run 0 as their context.
        spans = Spans(np.asarray([4, 3, 3]), np.asarray([-1, 0, 0]), device)
    else:
        # Flash attention tells packed rows apart by position ids that start again at 0.
        spans = None
    together = ids if shared else apart.flatten()
    positions = torch.cat([steps, steps[4:] if shared else steps])
    try:
        want = hidden_states(apart, steps.expand(2, -1)).flatten(0, 1).float()
        got = hidden_states(together[None], positions[None], spans)[0].float()
    # Wide, since the model may be any code from the hub: whatever it fails with, rows are padded and the log says why.
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        return f"a packed row fails in it ({type(error).__name__}: {str(error)[:200]})"
    if shared:
        # [14, H] -> [10, H]: the second row's copy of the prefix is computed once only in the packed row.
        want = torch.cat([want[:7], want[11:]])
    if float((got - want).abs().max()) <= tolerance * float(want.abs().max()):
        return ""
    return (
        "a packed row does not give it the hidden states of separate rows (it carries a state along the row, perhaps)"
    )
