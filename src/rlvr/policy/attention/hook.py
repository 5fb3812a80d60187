"""Packed rows in stock Hugging Face models: runs of tokens laid end to end in one row, each seeing what it continues
and itself, nothing else.

With spans in place (`attending`), every attention layer of a hooked model is computed by `merged.attend`, whatever
attention function the model was loaded with; caps, sinks and scale are those that the layer passes to its own. What a
layer may see (sliding window or all) is asked of the model itself, where it makes its masks.

Without spans in place the model computes as it did, from any thread: the hook passes everything on. Whether a model
computes packed rows is not assumed from its name but tried, once, on a few tokens.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from rlvr.policy.attention.merged import attend
from rlvr.policy.attention.scoring import Scoring
from rlvr.policy.attention.spans import Spans

PREFIX = "rlvr_"
EXACT = ("eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations of transformers that compute a layer's cap; sdpa leaves it out."""
# Arguments of transformers' attention functions that change nothing here: the mask is the spans', the window is asked
# of the mask, and the rest is for other implementations' packed rows.
WITHOUT_EFFECT = (
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "sliding_window",
    "use_cache",
)


@dataclass(frozen=True)
class _RowMask:
    """The mask of a layer while spans are in place."""

    spans: Spans
    window: int | None


# A context variable: a forward pass on another thread, of an engine that samples, say, sees no spans.
_spans: ContextVar[Spans | None] = ContextVar("spans", default=None)


@contextlib.contextmanager
def attending(spans: Spans | None) -> Iterator[None]:
    """Inside, a forward pass of a hooked model in this thread, over one row, attends as `spans` say. None: as ever."""
    token = _spans.set(spans)
    try:
        yield
    finally:
        _spans.reset(token)


def hook(model: Any) -> None:
    """Let `model` attend by spans; without spans it computes as before."""
    base = model.config._attn_implementation
    name = PREFIX + base
    AttentionInterface.register(name, partial(_attend, base))
    AttentionMaskInterface.register(name, partial(_mask, base))
    model.set_attn_implementation(name)


def unhook(model: Any) -> None:
    """Undo `hook`."""
    model.set_attn_implementation(model.config._attn_implementation.removeprefix(PREFIX))


def _mask(base: str, **arguments: Any) -> Any:
    spans = _spans.get()
    if spans is None:
        return AttentionMaskInterface()[base](**arguments)
    # transformers asks for vmap where a model adds a mask function of its own; then `Spans` would leave its part out.
    if arguments.get("use_vmap"):
        raise NotImplementedError("the model adds to the causal mask")
    return _RowMask(spans, arguments.get("local_size"))


def _attend(
    base: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, Any]:
    """The attention function of a hooked model; shapes [1, heads, N, D] -> [1, N, heads, E] under spans."""
    if not isinstance(attention_mask, _RowMask):
        given = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        # Those that the layer did not pass stay away: not every attention function takes them.
        given = {name: argument for name, argument in given.items() if argument is not None}
        return _function(base, module)(module, query, key, value, attention_mask, **given, **more)
    unknown = [name for name, argument in more.items() if argument is not None and name not in WITHOUT_EFFECT]
    if unknown or dropout:
        raise NotImplementedError(f"packed rows have no attention with {', '.join(unknown) or 'dropout'}")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scoring = Scoring(scaling, softcap if base in EXACT else None)
    segments = attention_mask.spans.segments(attention_mask.window)
    # [1, heads, N, D] -> [N, heads, D], as the layer had them before it put the heads in front.
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    sinks = s_aux if base in EXACT else None
    return attend(query, key, value, segments, scoring, sinks)[None], None


def _function(base: str, module: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The attention function that the model was loaded with."""
    if base == "eager":
        # Each model file has its own eager function, which transformers does not register.
        return sys.modules[type(module).__module__].eager_attention_forward
    return AttentionInterface()[base]


@dataclass(frozen=True)
class Packing:
    """Packed rows that a model can compute, and the reason where it cannot."""

    packs: bool
    shares: bool
    reason: str = ""


def try_packing(model: Any, hidden_states: Callable[..., torch.Tensor], tolerance: float) -> Packing:
    """Hook `model` and compare a packed row with shared prefixes to the rows apart; where they differ, unhook it again.

    `hidden_states(input_ids, position_ids, spans)` runs the model; `tolerance` is relative to the largest of them.
    """
    config = model.config.get_text_config()
    special = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
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
