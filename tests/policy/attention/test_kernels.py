"""Which kernel computes a call, and that the CUDA kernels are asked for what the others compute.

Flash attention runs on a GPU only. Here its two functions are replaced by dense attention in float64 that reads the
same arguments: what the kernels' classes hand over (offsets, widths, windows, caps, the merged log-sum-exp) is real.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_rows import random_inputs, some_spans
from rlvr.policy.attention import kernels, merged
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import FlashAttn, TorchFlash, kernel_for
from rlvr.policy.attention.merged import attend
from rlvr.policy.attention.padded import Padded, cpu_forward
from rlvr.policy.attention.tiles import tile_forward
from rlvr.policy.microbatch import call_pairs

TREE = {"lengths": [6, 4, 5, 2, 3], "contexts": [-1, 0, 1, 1, 0]}


def dense_flash(query, key, value, cu_q, cu_k, scale, left, right, softcap):
    """Flash attention by its definition, stretch by stretch: a query at place i of n sees the keys from
    i + m - n - left to i + m - n + right of m, -1 being no limit. Gives scores, masks and places too."""
    repeats = query.shape[1] // key.shape[1]
    stretches = []
    for first, end, first_key, end_key in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        q = query[first:end]
        k = key[first_key:end_key].repeat_interleave(repeats, 1)
        v = value[first_key:end_key].repeat_interleave(repeats, 1)
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(len(q))[:, None] + len(k) - len(q)
        other = torch.arange(len(k))
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if left >= 0:
            seen &= other >= place - left
        if right >= 0:
            seen &= other <= place + right
        stretches.append((scores.masked_fill(~seen, -torch.inf), v))
    return stretches


def flash_forward(*arguments):
    stretches = dense_flash(*arguments)
    outputs = [torch.einsum("hqk,khe->qhe", scores.softmax(-1), v) for scores, v in stretches]
    return torch.cat(outputs), torch.cat([scores.logsumexp(-1) for scores, _ in stretches], 1)


def flash_backward(gradient, query, key, value, output, lse, *rest):
    """Its backward pass with the given outputs and sums, as the kernels compute it, by autograd on
    sum of p x (gradient . v - gradient . out), with p = exp(score - lse) held constant where it multiplies."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        total = torch.zeros((), dtype=torch.float64)
        place = 0
        for scores, v in dense_flash(*leaves, *rest):
            part = slice(place, place + scores.shape[1])
            place += scores.shape[1]
            p = torch.exp(scores.detach() - lse[:, part, None])
            of_p = torch.einsum("qhe,khe->hqk", gradient[part], v)
            mean = (gradient[part] * output[part]).sum(-1).T[..., None]
            # d/d score of the outputs through softmax, and d/d value.
            visible = torch.where(p > 0, scores, 0.0)
            total = total + (p * (of_p.detach() - mean) * visible).sum() + (p * of_p).sum()
    return torch.autograd.grad(total, leaves)


@pytest.fixture
def torch_flash(monkeypatch):
    """torch's two operators, replaced; the arguments are read by the names of their schemas."""
    calls = []

    def asked(causal, window_size_left=None, window_size_right=None, scale=None):
        calls.append((causal, window_size_left))
        left = -1 if window_size_left is None else window_size_left
        right = 0 if causal else -1 if window_size_right is None else window_size_right
        return scale, left, right, None

    def forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **more):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max() and not dropout and not debug
        return (*flash_forward(query, key, value, cu_q, cu_k, *asked(causal, **more)), None, None, None)

    def backward(gradient, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, **more):
        assert lse.is_contiguous() and lse.shape == (query.shape[1], len(query))
        return flash_backward(gradient, query, key, value, out, lse, cu_q, cu_k, *asked(causal, **more))

    operators = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(kernels.torch, "ops", SimpleNamespace(aten=operators))
    monkeypatch.setattr(merged, "kernel_for", lambda *_: TorchFlash())
    return calls


@pytest.fixture
def flash_attn(monkeypatch):
    """The package flash-attn with its two functions replaced."""

    def asked(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes):
        assert dropout_p == 0.0 and alibi_slopes is None
        return softmax_scale, window_size_left, 0 if causal else window_size_right, softcap

    def forward(query, key, value, cu_q, cu_k, max_q, max_k, **options):
        return (*flash_forward(query, key, value, cu_q, cu_k, *asked(**options)), None, None)

    def backward(*given, deterministic, **options):
        *inputs, dq, dk, dv, cu_q, cu_k, _, _ = given
        gradients = flash_backward(*inputs, cu_q, cu_k, *asked(**options))
        for place, gradient in zip((dq, dk, dv), gradients, strict=True):
            place.copy_(gradient)

    interface = SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_interface=interface))
    monkeypatch.setattr(merged, "kernel_for", lambda *_: FlashAttn())


def both_ways(softcap, window, seed=0):
    """(outputs and gradients by the kernels chosen here, those by whatever kernel_for is replaced with)."""
    rng = np.random.default_rng(seed)
    spans = some_spans(rng, **TREE)
    inputs = random_inputs(rng, 20)
    sinks = torch.from_numpy(rng.normal(size=4)).requires_grad_()
    gradient = torch.from_numpy(rng.normal(size=(20, 4, inputs[2].shape[-1])))
    results = []
    for choose in (kernel_for, merged.kernel_for):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merged, "kernel_for", choose)
            if choose is kernel_for:
                patch.setattr(kernels.torch, "ops", REAL)
            output = attend(*inputs, spans.segments(window), ScoreRule(0.3, softcap), sinks)
            results.append([output, *torch.autograd.grad(output, [*inputs, sinks], gradient)])
    return results


REAL = torch.ops


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_torchs_flash_attention_is_asked_for_the_same(torch_flash, window, seed):
    ours, theirs = both_ways(None, window, seed)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if window is None:
        assert torch_flash[:2] == [(True, None), (False, None)]
    else:
        assert torch_flash == [(False, window - 1)] * 2


@pytest.mark.parametrize(("softcap", "window"), [(1.5, None), (1.5, 3), (None, 3)])
def test_the_package_flash_attn_is_asked_for_the_same(flash_attn, softcap, window):
    ours, theirs = both_ways(softcap, window)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_the_choice_of_a_kernel(monkeypatch):
    spans = some_spans(np.random.default_rng(0), **TREE)
    own, level, *_ = spans.segments(None)
    (windowed,) = spans.segments(3)

    def chosen(part, softcap=None, device="cpu", dtype=torch.bfloat16, width=64, narrow=64):
        with FakeTensorMode():
            query = torch.empty(20, 4, width, device=device, dtype=dtype)
            value = torch.empty(20, 2, narrow, device=device, dtype=dtype)
            return kernel_for(query, value, part, ScoreRule(1.0, softcap))

    plain, tiles = cpu_forward, tile_forward
    assert isinstance(chosen(own), Padded) and chosen(own).dense_forward is plain
    assert chosen(level).dense_forward is plain
    for kind in (chosen(windowed), chosen(own, softcap=1.0), chosen(own, narrow=32)):
        assert kind.dense_forward is tiles
    for part in (own, level, windowed):
        assert isinstance(chosen(part, device="cuda"), TorchFlash)
        assert isinstance(chosen(part, device="cuda", narrow=32), TorchFlash)
        assert chosen(part, device="cuda", dtype=torch.float32).dense_forward is tiles
        assert chosen(part, device="cuda", width=512).dense_forward is tiles
    kernels._has_flash_attn.cache_clear()
    assert chosen(own, softcap=1.0, device="cuda").dense_forward is tiles  # flash-attn is not installed here
    monkeypatch.setattr(kernels, "_has_flash_attn", lambda: True)
    assert isinstance(chosen(own, softcap=1.0, device="cuda"), FlashAttn)


@pytest.mark.parametrize("kind", ["namespace", "binary", "whole"])
def test_flash_attn_is_taken_if_it_can_be_imported(kind, tmp_path, monkeypatch, caplog):
    """flash-attn 4 alone is a namespace package; a wheel for another torch raises as its functions are imported."""
    folder = tmp_path / "flash_attn"
    (folder / "cute").mkdir(parents=True)
    names = "_flash_attn_varlen_forward = _flash_attn_varlen_backward = None"
    content = {"binary": "raise OSError('undefined symbol')", "whole": names}
    if kind in content:
        (folder / "__init__.py").touch()
        (folder / "flash_attn_interface.py").write_text(content[kind])
    monkeypatch.syspath_prepend(tmp_path)
    kernels._has_flash_attn.cache_clear()
    (part,) = some_spans(None, lengths=[5], contexts=[-1]).segments(None)
    try:
        with caplog.at_level("WARNING"), FakeTensorMode():
            query = torch.empty(5, 4, 64, device="cuda", dtype=torch.bfloat16)
            chosen = [kernel_for(query, query, part, ScoreRule(1.0, 50.0)) for _ in range(2)]
    finally:
        kernels._has_flash_attn.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]
    if kind == "whole":
        assert chosen == [FlashAttn(), FlashAttn()] and not caplog.records
    else:
        assert all(one.dense_forward is tile_forward for one in chosen)
        (record,) = caplog.records
        assert "flash-attn 2" in record.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operators_of_torch_have_the_shapes_that_are_used(dtype):
    """torch's own fake kernels of flash attention, and the real one for a CPU."""
    spans = some_spans(None, **TREE)
    if dtype == torch.bfloat16:
        with FakeTensorMode(allow_non_fake_inputs=True):
            query, key = (torch.empty(20, heads, 64, dtype=dtype) for heads in (8, 2))
            for part in spans.segments(None):
                q, k, _ = merged._taken(query, key, key, part)
                output, lse = TorchFlash().forward(q, k, k, part, ScoreRule(0.1))
                assert output.shape == q.shape and lse.shape == (8, len(q)) and lse.dtype == torch.float32
                gradients = TorchFlash().backward(output, q, k, k, output, lse, part, ScoreRule(0.1))
                assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]
    query, key = (torch.randn(2, heads, 5, 8, dtype=dtype) for heads in (4, 2))
    (part,) = some_spans(None, lengths=[5], contexts=[-1]).segments(None)
    output, lse = cpu_forward(query, key, key, part, ScoreRule(0.1))
    assert output.shape == query.shape and lse.shape == (2, 4, 5)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_what_is_executed_is_what_is_needed():
    """Matrix products of forward and backward over those of the visible pairs: at most 1.05, by the tiles."""
    from torch.utils.flop_counter import FlopCounterMode

    (part,) = some_spans(None, lengths=[16384], contexts=[-1]).segments(None)
    heads, width = 2, 64
    with torch.device("meta"):
        query, key, value = (torch.empty(1, heads, 16384, width) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        output, _ = tile_forward(query, key, value, part, ScoreRule(0.1))
    assert output.shape == query.shape
    needed = 4 * heads * width * call_pairs(part)
    assert math.isclose(call_pairs(part), 16384 * 16385 / 2)
    assert 1.0 <= counter.get_total_flops() / needed <= 1.05
