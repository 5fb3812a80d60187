"""Packed rows tried on a model.

That a model computes packed rows is not assumed from its name but tried, once, on a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvr.policy.attention.packed_rows import Spans, hook, unhook


@dataclass(frozen=True)
class Packing:
    """Packed rows that a model can compute, and the reason where it cannot."""

    packs: bool
    shares: bool
    reason: str = ""


def unpackable_layers(config: Any) -> set[str]:
    """The kinds of layers of a model, by its text configuration, that no packed row is computed by."""
    return set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}


def try_packing(model: Any, hidden_states: Callable[..., torch.Tensor], tolerance: float) -> Packing:
    """Hook `model` and compare a packed row with shared prefixes to the rows apart; where they differ, unhook it again.

    `hidden_states(input_ids, position_ids, spans)` runs the model; `tolerance` is relative to the largest of them.
    """
    special = unpackable_layers(model.config.get_text_config())
    if special:
        return Packing(False, False, f"its layers are of type {', '.join(sorted(special))}")
    hook(model)
    trouble = _disagree(hidden_states, model, tolerance)
    if trouble:
        unhook(model)
    return Packing(not trouble, not trouble, trouble)


def _disagree(hidden_states: Callable[..., torch.Tensor], model: Any, tolerance: float) -> str:
    """Why a packed row of three short rollouts is not computed as they are apart; empty where it is."""
    weight = model.get_input_embeddings().weight
    device = weight.device
    # [12]: a prefix of 4 tokens, a run of 2 that continues it and is continued by two runs of 2, and one more run of 2
    # that continues the prefix. Any ids that differ would do; modulo the vocabulary they exist.
    ids = (torch.arange(12, device=device) * 7 + 3) % weight.shape[0]
    spans = Spans(np.asarray([4, 2, 2, 2, 2]), np.asarray([-1, 0, 1, 1, 0]), device)
    trunk = ids[:6]
    # The last rollout is shorter by two, and is padded with two of its own tokens, which it does not see.
    apart = torch.stack(
        [torch.cat([trunk, ids[6:8]]), torch.cat([trunk, ids[8:10]]), torch.cat([ids[:4], ids[10:], ids[10:]])]
    )
    steps = torch.arange(8, device=device)
    positions = torch.as_tensor(spans.positions, device=device)
    try:
        want = hidden_states(apart, steps.expand(3, -1)).float()
        got = hidden_states(ids[None], positions[None], spans)[0].float()
    # Wide, since the model may be any code from the hub: whatever it fails with, rows are padded and the log says why.
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        return f"a packed row fails in it ({type(error).__name__}: {str(error)[:200]})"
    # [12, H] in the order of the packed row: prefix and trunk once.
    want = torch.cat([want[0], want[1, 6:], want[2, 4:6]])
    if float((got - want).abs().max()) <= tolerance * float(want.abs().max()):
        return ""
    return (
        "a packed row does not give it the hidden states of separate rows (it carries a state along the row, perhaps)"
    )
