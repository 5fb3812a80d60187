"""Which kernel computes a call, and that the CUDA kernels are asked for what the others compute.

Flash attention runs on a GPU only. Here its two functions are replaced by dense attention in float64 that reads the
same arguments: what the kernels' classes hand over (offsets, widths, windows, caps, the merged log-sum-exp) is real.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_rows import random_inputs, some_spans
from rlvr.policy.attention import kernels, merged, tiles
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import FlashAttn, TorchFlash, kernel_for, kernels_of
from rlvr.policy.attention.merged import attend
from rlvr.policy.attention.padded import CpuFlash, Padded
from rlvr.policy.attention.tiles import Tiles, gpu_scores, tiles_of
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

    cpu_tiles = Tiles(tiles.CPU_SCORES, tiles.CPU_KEYS)
    gpu_tiles = Tiles(tiles.GPU_SCORES)  # this torch has no CUDA, and so no wide sums
    for kind in (chosen(own), chosen(level)):
        assert isinstance(kind, Padded) and isinstance(kind.dense, CpuFlash)
    for kind in (chosen(windowed), chosen(own, softcap=1.0), chosen(own, narrow=32)):
        assert kind.dense == cpu_tiles
    for part in (own, level, windowed):
        assert isinstance(chosen(part, device="cuda"), TorchFlash)
        assert isinstance(chosen(part, device="cuda", narrow=32), TorchFlash)
        assert chosen(part, device="cuda", dtype=torch.float32).dense == gpu_tiles
        assert chosen(part, device="cuda", width=512).dense == gpu_tiles
    kernels._has_flash_attn.cache_clear()
    assert chosen(own, softcap=1.0, device="cuda").dense == gpu_tiles  # flash-attn is not installed here
    monkeypatch.setattr(tiles, "sums_wide", lambda device: True)
    assert chosen(own, softcap=1.0, device="cuda").dense == Tiles(tiles.GPU_SCORES, wide_sums=True)
    monkeypatch.setattr(kernels, "_has_flash_attn", lambda: True)
    assert isinstance(chosen(own, softcap=1.0, device="cuda"), FlashAttn)


@pytest.mark.parametrize(("capability", "flash"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_gpus_before_ampere_have_tiles(capability, flash, softcap, monkeypatch):
    (part,) = some_spans(None, lengths=[5], contexts=[-1]).segments(None)
    with FakeTensorMode():
        query = torch.empty(5, 4, 64, device="cuda", dtype=torch.float16)
    memory = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(kernels, "_has_flash_attn", lambda: True)
    caches = (kernels._is_ampere, tiles.gpu_scores, tiles.sums_wide)
    for cached in caches:
        cached.cache_clear()
    try:
        chosen = kernel_for(query, query, part, ScoreRule(1.0, softcap))
    finally:
        for cached in caches:
            cached.cache_clear()
    assert isinstance(chosen, (TorchFlash, FlashAttn)) == flash
    assert flash or isinstance(chosen.dense, Tiles)


@pytest.mark.parametrize("kind", ["namespace", "binary", "old", "whole"])
def test_flash_attn_is_taken_if_it_can_be_imported(kind, tmp_path, monkeypatch, caplog):
    """flash-attn 4 alone is a namespace package; a wheel for another torch raises as its functions are imported; before
    2.7 the functions have other arguments."""
    folder = tmp_path / "flash_attn"
    (folder / "cute").mkdir(parents=True)
    names = "_flash_attn_varlen_forward = _flash_attn_varlen_backward = None"
    content = {"binary": "raise OSError('undefined symbol')", "old": names, "whole": names}
    if kind in content:
        (folder / "__init__.py").write_text(f"__version__ = '{'2.6.3' if kind == 'old' else '2.8.3.post1'}'")
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
        assert all(isinstance(one.dense, Tiles) for one in chosen)
        (record,) = caplog.records
        assert "flash-attn 2" in record.message
        assert ("2.6.3" in record.message) == (kind == "old")


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
    output, lse = CpuFlash().forward(query, key, key, part, ScoreRule(0.1))
    assert output.shape == query.shape and lse.shape == (2, 4, 5)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


class Launches(TorchDispatchMode):
    """Counts operations that compute, by name, the FLOPs of products, and the most numbers that one gives."""

    def __init__(self):
        super().__init__()
        self.names = Counter()
        self.largest = 0
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        computes = not func.is_view and func.namespace == "aten" and "empty" not in name
        if computes and name not in ("detach", "alias", "lift_fresh"):
            self.names[name] += 1
            if name == "bmm":
                self.flops += 2 * made.numel() * args[0].shape[-1]
            self.largest = max([self.largest, *(t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor))])
        return made


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_is_executed_is_what_is_needed(kind):
    """Matrix products of forward and backward over those of the visible pairs: at most 1.05, by the tiles."""
    (part,) = some_spans(None, lengths=[16384], contexts=[-1]).segments(None)
    heads, width = 2, 64
    with torch.device("meta"):
        query, key, value = (torch.empty(1, heads, 16384, width, dtype=torch.bfloat16) for _ in range(3))
    chosen = tiles_of(torch.device("meta"), kind)
    with Launches() as forward:
        output, lse = chosen.forward(query, key, value, part, ScoreRule(0.1))
    with Launches() as backward:
        chosen.backward(output, query, key, value, output, lse, part, ScoreRule(0.1))
    assert output.shape == query.shape and chosen.wide_sums == (kind == "cuda")
    assert math.isclose(call_pairs(part), 16384 * 16385 / 2)
    # Two products of 2 FLOPs for each pair and channel; then the scores again and four products.
    needed = 4 * heads * width * call_pairs(part)
    assert 1.0 <= forward.flops / needed <= 1.05
    assert 1.0 <= backward.flops / (2.5 * needed) <= 1.05


def test_tiles_of_a_gpu_are_of_its_memory(monkeypatch):
    """256 MiB of scores; on a small GPU at most a 64th of its memory for all that there is at once, 16 bytes each."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gigabytes, scores in ((141, 1 << 26), (80, 1 << 26), (24, 1 << 24)):
        memory = SimpleNamespace(total_memory=gigabytes * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, memory=memory: memory)
        gpu_scores.cache_clear()
        assert gpu_scores(device) == scores
        assert 16 * scores <= memory.total_memory / 64 < 2 * 16 * scores or scores == 1 << 26
    gpu_scores.cache_clear()


def launches(lengths, contexts, window, softcap, heads=8, groups=4, width=64):
    """Operations of the forward and of the backward pass of attention on a GPU in bfloat16, without flash-attn."""
    spans = some_spans(None, lengths=lengths, contexts=contexts)
    parts = spans.segments(window)
    for part in parts:
        _ = part.varlen, part.blocks
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of("cuda"):
        query, key, value = (
            torch.empty(sum(lengths), count, width, dtype=torch.bfloat16, requires_grad=True)
            for count in (heads, groups, groups)
        )
        with Launches() as forward:
            output = attend(query, key, value, parts, ScoreRule(0.1, softcap))
        with Launches() as backward:
            output.backward(torch.empty_like(output))
    return forward, backward


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("window", [None, 24])
def test_launches_do_not_grow_with_the_members_of_a_group(window, softcap):
    """Of a prompt's keys each member has those of its window: their gradients are added up at once."""
    found = []
    for members in (2, 8, 32):
        both = launches([32] + members * [32], [-1] + members * [0], window, softcap)
        found.append([passed.names for passed in both])
    assert found[0] == found[1] == found[2]
    assert sum(found[0][1].values()) > 0


@pytest.mark.parametrize("window", [None, 4096])
def test_a_gpu_has_few_tiles_of_few_bytes(window):
    """Attention of Gemma-2-9B to 8,192 tokens: none has more than its 256 MiB, and no fewer tiles would have room."""
    (part,) = some_spans(None, lengths=[8192], contexts=[-1]).segments(window)
    query = torch.empty(1, 16, 8192, 256, device="meta")
    key = torch.empty(1, 8, 8192, 256, device="meta")
    kind = tiles_of(torch.device("meta"), "cuda")
    strips = kind._strips(query, key, part)
    # All keys that 512 queries see are in one tile: of 16 heads, 512 queries and 8,192 keys 2^26 scores.
    assert [len(strip.tiles) for strip in strips] == 16 * [1]
    sizes = [16 * 512 * (tile.keys.stop - tile.keys.start) for strip in strips for tile in strip.tiles]
    # Half of 512 keys too many for each query at each end of what it sees.
    assert max(sizes) <= 1 << 26 and sum(sizes) <= 16 * 1.15 * call_pairs(part)
    # 2,048 keys that all of 14,336 queries see.
    _, level = some_spans(None, lengths=[2048, 7168, 7168], contexts=[-1, 0, 0]).segments(None)
    strips = kind._strips(query.expand(1, 16, 8192, 256), key[:, :, :2048], level)
    assert [(strip.queries.stop - strip.queries.start, len(strip.tiles)) for strip in strips] == 4 * [(2048, 1)]
