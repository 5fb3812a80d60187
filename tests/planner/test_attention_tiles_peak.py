"""Memory of attention in tiles (a GPU in float32, or with a soft-cap and without flash-attn) against what is there."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
from fake_peak import GPU_MEMORY, fake_policy, like_a_gpu, measure, micro_batch, rollouts_of
from torch._subclasses.fake_tensor import FakeTensorMode

from rlvr.config import ModelConfig, OptimConfig
from rlvr.core.needs import Need
from rlvr.planner import micro_batch as planner_micro_batch
from rlvr.planner import micro_batch_bytes, shape_of
from rlvr.planner.decoder_passes import LiveBytes
from rlvr.planner.micro_batch import scoring_bytes, tile_bytes, way_of
from rlvr.policy import forward
from rlvr.policy.attention import Spans, kernels, merged
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import kernels_of
from rlvr.policy.attention.tiles import WatchedTiles

HEADS, GROUPS, WIDTH = 8, 2, 8


def inside_tiles(tiles, lengths, dtype, capped):
    """Bytes that the largest tile of the forward and of the backward pass has, beside what is there when it begins."""
    most = [0]

    @contextlib.contextmanager
    def watch():
        live.peak = begin = live.now
        yield
        most[0] = max(most[0], live.peak - begin)

    tiles = WatchedTiles(tiles.scores, tiles.most_keys, tiles.wide_sums, tiles.queries, watch)
    rows, length = len(lengths), lengths[0]
    (part,) = Spans(np.asarray(lengths), np.full(rows, -1), torch.device("cpu")).segments(None)
    rule = ScoreRule(0.1, 30.0 if capped else None)
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.empty(rows, n, length, WIDTH, dtype=dtype) for n in (HEADS, GROUPS, GROUPS))
        with LiveBytes([query, key, value]) as live:
            output, lse = tiles.forward(query, key, value, part, rule)
            found.append(most[0])
            most[0] = 0
            tiles.backward(output, query, key, value, output, lse, part, rule)
            found.append(most[0])
    return found


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("lengths", [[8192], [1024] * 5, [300] * 3, [1536]], ids=str)
def test_bytes_of_a_tile_are_those_that_are_there(lengths, wide, dtype, capped):
    tiles = WatchedTiles(1 << 23, wide_sums=wide)
    found = inside_tiles(tiles, lengths, dtype, capped)
    scores = tiles.most_scores(HEADS, len(lengths), lengths[0], lengths[0], causal=True)
    assert scores <= tiles.scores
    for size, backward in zip(found, (False, True), strict=True):
        # What a tile has for each query, key or pair of all heads beside its scores: a few percent at this width.
        assert size == pytest.approx(scores * tiles.bytes_of_score(dtype, capped, backward), rel=0.12)
        assert size > 0.99 * scores * tiles.bytes_of_score(dtype, capped, backward)


# HuggingFaceTB/SmolLM2-135M and google/gemma-2-2b, config.json on the Hugging Face hub, of four layers.
SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1 << 17,
}
GEMMA = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 1 << 17,
}


@contextlib.contextmanager
def without_flash_attn():
    """A GPU whose attention is in tiles where torch's flash attention does not compute it."""
    with like_a_gpu(), pytest.MonkeyPatch.context() as patch, kernels_of("cuda"):
        patch.setattr(merged, "kernel_for", kernels.kernel_for)
        yield


@pytest.fixture(autouse=True)
def planned_for_such_a_gpu(monkeypatch):
    monkeypatch.setattr(planner_micro_batch, "has_triton", lambda: True)
    monkeypatch.setattr(kernels, "_has_flash_attn", lambda: False)


def planned_and_measured(folder, described, sizes, dtype, share=False, **options):
    """Bytes by part of the plan of one micro-batch, and all bytes of its peak."""
    groups, members, prompt, completion = sizes
    with without_flash_attn():
        policy = fake_policy(described, dtype=dtype, **options)
        optim = OptimConfig(packing=True, share_prefix=share)
        rows = micro_batch(policy, rollouts_of(groups, members, prompt, completion), optim)
        peak = measure(policy, rows)
    (folder / "config.json").write_text(json.dumps(described))
    config = ModelConfig(path=str(folder), dtype=dtype, device="cpu", **options)
    tokens = rows.input_ids.numel()
    prefix = prompt if share else 0
    length = prompt + completion
    shape = shape_of(config)
    planned = micro_batch_bytes(shape, config, tokens, len(rows.flat), length, gpu_memory=GPU_MEMORY, prefix=prefix)
    return planned, peak.rest


@pytest.mark.gate
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sizes",
    [
        (8, 4, 100, 412),
        *(pytest.param(size, marks=pytest.mark.slow) for size in ((1, 1, 1024, 7168), (2, 2, 1024, 3072))),
    ],
    ids=str,
)
def test_the_plan_counts_the_tiles_of_a_gpu_in_float32(sizes, checkpointing, tmp_path):
    planned, measured = planned_and_measured(tmp_path, SMOL, sizes, "float32", gradient_checkpointing=checkpointing)
    assert sum(planned.values()) == pytest.approx(measured, rel=0.07)
    assert planned["tiles of attention"] > 0.08 * measured


@pytest.mark.gate
def test_the_plan_counts_the_tiles_below_a_shared_prompt(tmp_path):
    sizes = (1, 4, 4096, 2048)
    planned, measured = planned_and_measured(tmp_path, SMOL, sizes, "float32", True, gradient_checkpointing=True)
    # Of outputs that are merged by parts the plan counts nothing: they are not there beside a tile.
    assert 0.93 * measured < sum(planned.values()) < 1.1 * measured
    assert planned["tiles of attention"] == 8 * ((1 << 26) // (9 * 4096) * 9 * 4096)


@pytest.mark.slow
def test_the_plan_of_capped_attention_is_its_peak(tmp_path):
    """Most is there in the feed-forward part, but the tiles are looked at."""
    sizes = (1, 1, 1024, 7168)
    options = {"gradient_checkpointing": True, "adapter": {"r": 16}}
    planned, measured = planned_and_measured(tmp_path, GEMMA, sizes, "bfloat16", **options)
    assert sum(planned.values()) == pytest.approx(measured, rel=0.07)
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cpu", **options)
    shape = shape_of(config)
    way = way_of(config, on_gpu=True)
    assert shape.decoder.passes(way).attention.per_token > 0
    # 8 heads, 512 queries, 8,192 keys, with the tanh of the cap 16 bytes each.
    assert tile_bytes(shape, way, 8192, 8192, GPU_MEMORY) == 8 * 512 * 8192 * 16


def test_a_gpu_with_flash_attention_has_no_tiles(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16", device="cpu")
    passes = shape_of(config).decoder.passes(way_of(config, on_gpu=True))
    assert passes.attention.per_token == passes.attention_inference.per_token == 0
    assert passes.backward.per_token > 0


@pytest.mark.slow
def test_the_plan_of_a_pass_without_gradients_counts_tiles(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOL))
    config = ModelConfig(path=str(tmp_path), dtype="float32", device="cpu")
    with without_flash_attn():
        policy = fake_policy(SMOL, dtype="float32")
        optim = OptimConfig(packing=True, share_prefix=False)
        rows = micro_batch(policy, rollouts_of(1, 1, 1024, 7168), optim)
        with torch.no_grad(), LiveBytes([*policy.model.parameters(), *policy.model.buffers()]) as live:
            forward(policy, rows, [Need("logprobs")])
    shape = shape_of(config)
    planned = scoring_bytes(shape, config, 8192, 8192, GPU_MEMORY)
    assert 0.97 * live.peak < planned < 1.15 * live.peak
    # More than on a CPU, whose kernel has none.
    assert planned > 1.2 * scoring_bytes(shape, config, 8192, 8192, None)
