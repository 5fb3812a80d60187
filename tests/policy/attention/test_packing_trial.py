"""The trial of packed rows refuses a model that is wrong in any one way, and accepts it as it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from architectures import ARCHITECTURES, policy_of
from rlvr.policy.attention import packed_rows
from rlvr.policy.attention.packed_rows import Spans
from rlvr.policy.attention.packing_trial import CONTEXTS, LENGTHS, ROWS, WINDOW

attend = packed_rows.attend
mask = packed_rows._mask
merged = Spans._merged
windowed = Spans._windowed


def made(kind, **more):
    return policy_of(kind, {**ARCHITECTURES[kind], **more})


def fails(*_, **__):
    raise NotImplementedError("no such attention")


def without_window(base, **arguments):
    made = mask(base, **arguments)
    return dataclasses.replace(made, window=None) if isinstance(made, packed_rows._RowMask) else made


BROKEN = {
    "a window is forgotten": ("mistral", packed_rows, "_mask", without_window, "hidden states"),
    "a window is one token too long": (
        "mistral",
        Spans,
        "_windowed",
        lambda spans, window: windowed(spans, window + 1),
        "hidden states",
    ),
    "a window does not reach into what a run continues": (
        "mistral",
        Spans,
        "_windowed",
        lambda spans, window: windowed(dataclasses.replace(spans, context=spans.context * 0 - 1), window),
        "hidden states",
    ),
    "a second level of contexts is forgotten": (
        "llama",
        Spans,
        "_merged",
        lambda spans: merged(spans)[:-1],
        "hidden states",
    ),
    "keys get no gradient": (
        "llama",
        packed_rows,
        "attend",
        lambda query, key, *rest: attend(query, key.detach(), *rest),
        "gradients",
    ),
    "gradients of values are halved": (
        "mistral",
        packed_rows,
        "attend",
        lambda query, key, value, *rest: attend(query, key, 0.5 * value + 0.5 * value.detach(), *rest),
        "gradients",
    ),
    "sinks get no gradient": (
        "gpt_oss",
        packed_rows,
        "attend",
        lambda *given: attend(*given[:-1], given[-1].detach()),
        "gradients",
    ),
    "it raises": ("llama", packed_rows, "attend", fails, "no such attention"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_a_model_that_is_wrong_in_one_way_is_not_packed(way, monkeypatch):
    kind, owner, name, broken, why = BROKEN[way]
    assert made(kind).packing.packs
    monkeypatch.setattr(owner, name, broken)
    packing = made(kind).packing
    assert not packing.packs and why in packing.reason


def test_the_trial_crosses_its_window_in_every_way():
    """Within a run, from a run into what it continues, and through a short run into the one before it."""
    lengths = dict(enumerate(LENGTHS))
    assert max(LENGTHS) > WINDOW
    assert any(CONTEXTS[s] >= 0 and lengths[CONTEXTS[s]] < WINDOW - 1 and CONTEXTS[CONTEXTS[s]] >= 0 for s in lengths)
    assert sorted({run for runs in ROWS for run in runs}) == list(lengths)


def test_the_trial_leaves_window_weights_and_gradients_as_they_were():
    policy = made("mistral", sliding_window=4096)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    with torch.inference_mode(), torch.no_grad():
        assert policy.packing.packs
    assert policy.causal_lm.config.sliding_window == 4096
    assert not policy.causal_lm.get_input_embeddings()._forward_hooks
    for name, p in policy.model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None


@pytest.mark.parametrize(
    ("on_gpu", "dtype", "heads"), [(True, torch.float32, 4), (True, torch.bfloat16, 2), (False, torch.float32, 2)]
)
def test_padded_rows_in_float32_on_a_gpu_have_keys_for_every_query_head(on_gpu, dtype, heads, monkeypatch):
    """torch's memory-efficient kernel takes no grouped queries, and its math kernel makes all scores."""
    policy = made("llama")
    assert policy.packing.packs
    policy.dtype = dtype
    real = torch.nn.functional.scaled_dot_product_attention
    seen = []

    def watched(query, key, value, **more):
        seen.append((query.shape[1], key.shape[1], value.shape[1]))
        return real(query, key, value, **more)

    ids = torch.arange(24).view(2, 12)
    positions = torch.arange(12).expand(2, -1)
    want = policy.hidden_states(ids, positions)
    monkeypatch.setattr(packed_rows, "_on_gpu", lambda tensor: on_gpu)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    got = policy.hidden_states(ids, positions)
    assert seen == [(4, heads, heads)] * 3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
