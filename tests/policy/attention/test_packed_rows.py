"""Packed rows, shared prefixes and trees of thirty architectures against padded rows; what none of them ever makes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, masking_utils

from architectures import ARCHITECTURES, policy_of
from number_oracles import gap, gradient_of
from rlvr.config import OptimConfig
from rlvr.core.needs import CURRENT, Need
from rlvr.errors import ConfigError
from rlvr.policy import check_packing, forward, micro_batches, microbatch
from rlvr.policy.attention import Spans, kernels, tiles
from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import kernels_of
from rlvr.policy.attention.merged import attend
from rlvr.policy.attention.packed_rows import Shared
from rlvr.policy.attention.tiles import Tiles
from rlvr.policy.attention_speed import SPEEDS, AttentionSpeed
from rlvr.policy.layer_sizes import LayerSizes, head_widths
from rlvr.policy.microbatch import Cost, packed_row
from rlvr.records import Batch, Origin, Rollout, StopReason, Task

PADDED = {
    "bloom": {},  # ALiBi
    "gptj": {"rotary_dim": 4},  # attention of its own, which transformers cannot replace
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 96},  # ALiBi
    "llama4_text": {"attention_chunk_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1},  # chunked
}
WAYS = {
    "packed": {"packing": True, "share_prefix": False},
    "shared": {"share_prefix": True},
    "tree": {"share_prefix": True},
}


def branching():
    """Two groups: a prompt of 20 tokens, two trunks of 12 with three responses each and one response beside them; and
    a prompt of 3 with two responses that differ at once."""
    rng = np.random.default_rng(0)
    rollouts = []

    def add(group, prompt, tail):
        ids = np.concatenate([prompt, tail])
        origin = np.concatenate([np.full(len(prompt), Origin.PROMPT), np.full(len(tail), Origin.POLICY)])
        rollouts.append(
            Rollout(
                id=f"{group}/{len(rollouts)}",
                task=Task(group, "?"),
                group=group,
                member=len(rollouts),
                token_ids=ids,
                origin=origin.astype(np.int8),
                behaviour_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
                policy_version=np.zeros(len(ids), dtype=np.int32),
                stop=StopReason.END,
            )
        )

    prompt = rng.integers(3, 50, 20)
    for first in (5, 6):
        trunk = np.concatenate([[first], rng.integers(3, 50, 11)])
        for last in (7, 8, 9):
            add("tree", prompt, np.concatenate([trunk, [last], rng.integers(3, 50, int(rng.integers(1, 12)))]))
    add("tree", prompt, np.concatenate([[10], rng.integers(3, 50, 9)]))
    short = rng.integers(3, 50, 3)
    for first in (11, 12):
        add("pair", short, np.concatenate([[first], rng.integers(3, 50, 6)]))
    return Batch(rollouts)


def measured(policy, batch, options):
    """(log-probs of the trained tokens, gradient of a weighted sum of them, the micro-batches)."""
    trained = [r.sampled for r in batch.rollouts]
    columns = [np.linspace(-1, 1, len(r)).astype(np.float32) + i for i, r in enumerate(batch.rollouts)]
    made = list(micro_batches(policy, batch, np.arange(len(batch)), trained, OptimConfig(**options)))
    total = torch.zeros(())
    values = [np.zeros(len(r)) for r in batch.rollouts]
    for rows in made:
        logprobs = forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", CURRENT]
        total = total + (torch.from_numpy(rows.at_trained(columns)) * logprobs).sum()
        lengths = np.cumsum([0, *(len(batch.rollouts[i]) for i in rows.index)])
        for place, value in zip(rows.flat, logprobs.detach().numpy(), strict=True):
            row = int(np.searchsorted(lengths, place, side="right")) - 1
            values[rows.index[row]][place - lengths[row]] = value
    return np.concatenate(values), gradient_of(policy.model, total).double(), made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_shared_and_branching_rows_are_the_padded_ones(architecture, monkeypatch):
    policy = policy_of(architecture, ARCHITECTURES[architecture])
    batch = branching()
    want, of_want, _ = measured(policy, batch, {"packing": False})
    for way, options in WAYS.items():
        if way == "tree":  # each level of sharing pays
            monkeypatch.setitem(SPEEDS, "cpu", AttentionSpeed(pair=1.0, call=1.0))
        got, of_got, (rows,) = measured(policy, batch, options)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=way)
        assert gap(of_got, of_want) < 1e-5, way
        tokens = {"packed": sum(map(len, batch.rollouts)), "shared": None, "tree": None}[way]
        assert rows.spans is not None and (tokens is None or rows.input_ids.numel() == tokens)
    assert (rows.spans.context >= 0).sum() >= 8 and rows.spans.chain(len(rows.spans.length) - 4)
    depths = [len(rows.spans.chain(run)) for run in range(len(rows.spans.length))]
    assert max(depths) == 2


@pytest.mark.parametrize("architecture", PADDED)
def test_families_without_such_attention_are_padded(architecture):
    policy = policy_of(architecture, PADDED[architecture])
    assert not policy.packing.packs and policy.packing.reason


ROPES = {
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 25},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 24,
        }
    },
}
"""Rotary angles that are the same for all rows of at most 24 tokens, and beyond those of the longest row."""


@pytest.mark.parametrize("rope", ROPES)
def test_rows_are_padded_where_rotary_angles_depend_on_the_longest(rope, monkeypatch, caplog):
    monkeypatch.setattr(microbatch, "GAIN", {"cpu": 1e9})  # packed rows are taken wherever they can be
    monkeypatch.setattr(microbatch, "_warned", set())
    policy = policy_of("llama", ROPES[rope])
    assert policy.layers.one_rope_up_to == 24
    batch = branching()
    short = Batch([rollout for rollout in batch.rollouts if rollout.group == "pair"])
    assert max(map(len, short.rollouts)) <= 24 < max(map(len, batch.rollouts))
    alone, of_alone, _ = measured(policy, short, {"packing": False})
    got, of_got, made = measured(policy, short, {})
    assert made[0].spans is not None
    np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-5)
    assert gap(of_got, of_alone) < 1e-5
    # Beside longer rollouts the same ones would have other log-probs in a packed row.
    everything = np.arange(len(batch))
    trained = [rollout.sampled for rollout in batch.rollouts]
    row = packed_row(batch, everything, trained, Shared.nothing(len(batch)), policy.device)
    together = forward(policy, row, [Need("logprobs")])["logprobs", CURRENT].detach().numpy()[-14:]
    assert np.abs(together - alone[alone != 0]).max() > 1e-3
    with caplog.at_level("WARNING"):
        _, _, made = measured(policy, batch, {})
    assert all(rows.spans is None for rows in made)
    assert "longer than 24 tokens" in caplog.text
    for key in ("packing", "share_prefix"):
        with pytest.raises(ConfigError, match=f"optim.{key} is true, and beyond 24 tokens.*set it to auto"):
            check_packing(policy, OptimConfig(**{key: True}))


def test_the_rows_of_other_ropes_have_no_such_limit():
    assert policy_of("llama", ARCHITECTURES["llama"]).layers.one_rope_up_to == math.inf
    assert policy_of("gpt2", {}).layers.one_rope_up_to == math.inf
    rope = {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    rope["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    more = {**ARCHITECTURES["gemma3_text"], "rope_parameters": rope, "max_position_embeddings": 48}
    assert policy_of("gemma3_text", more).layers.one_rope_up_to == 47


class Sizes(TorchDispatchMode):
    """Operations that give a tensor with two dimensions of at least `long`, and the most numbers of one whose last two
    are at least `tile`."""

    def __init__(self, long, tile):
        super().__init__()
        self.long = long
        self.tile = tile
        self.wrong = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                if sum(size >= self.long for size in tensor.shape) > 1:
                    self.wrong.add(f"{func} {tuple(tensor.shape)}")
                if tensor.dim() > 1 and min(tensor.shape[-2:]) >= self.tile:
                    self.largest = max(self.largest, tensor.numel())
        return output


def one_group(prompt, responses, response):
    """A prompt and responses that have one more token in common than it, two by two."""
    rollouts = []
    for member in range(responses):
        ids = np.full(prompt + response, 3, dtype=np.int64)
        ids[prompt] = 4 + member // 2
        ids[prompt + 1] = 4 + member
        rollouts.append(
            Rollout(
                id=str(member),
                task=Task("t", "?"),
                group="t",
                member=member,
                token_ids=ids,
                origin=np.repeat([Origin.PROMPT, Origin.POLICY], [prompt, response]).astype(np.int8),
                behaviour_logprobs=np.zeros(len(ids), dtype=np.float32),
                policy_version=np.zeros(len(ids), dtype=np.int32),
                stop=StopReason.END,
            )
        )
    return Batch(rollouts)


KINDS = ("qwen2", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
"""Full attention with grouped queries, a window, a soft-cap with windows, sinks with windows, values that are narrower
than keys."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_no_tensor_of_a_long_update_has_two_dimensions_of_tokens(architecture, device, monkeypatch):
    """Forward, LM head and backward of 65,536 tokens, a prompt of 16,384 and six responses of 8,192, on fake tensors,
    by the kernels of either device."""
    more = dict(ARCHITECTURES[architecture])
    if "sliding_window" in more:
        more["sliding_window"] = 4096
    policy = policy_of(architecture, {**more, "max_position_embeddings": 1 << 17})
    assert policy.packing.shares and policy.head_is_enough is not None
    if device == "cuda":
        policy.model.to(torch.bfloat16)
    elif any("expert" in name for name in more):
        policy.model.to(torch.bfloat16)  # torch's fake kernel of grouped products takes it alone
    # Larger than they are on a CPU, for fewer of them.
    monkeypatch.setattr(kernels, "tiles_of", lambda *_: Tiles(1 << 26, 4096, wide_sums=device == "cuda", queries=4096))
    # It reads values; with spans in place nothing looks at what it gives.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    batch = one_group(16384, 6, 8192)
    trained = [rollout.sampled for rollout in batch.rollouts]
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of(device), Sizes(4097, 4097) as sizes:
        (rows,) = micro_batches(policy, batch, np.arange(6), trained, OptimConfig(share_prefix=True))
        statistics = forward(policy, rows, [Need("logprobs", grad=True), Need("entropy")])
        logprobs = statistics["logprobs", CURRENT]
        logprobs.sum().backward()
    assert rows.input_ids.shape == (1, 65536) and logprobs.shape == (6 * 8192,)
    assert not sizes.wrong
    assert all(p.grad is not None for p in policy.trainable().values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "architecture",
    [
        "mistral",
        "gpt_oss",
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
    ],
)
def test_rollouts_that_fill_a_micro_batch_have_no_mask_by_default(architecture, device, monkeypatch):
    """Two rollouts of 65,536 tokens, each in a micro-batch of its own, by the layout that `auto` takes on either
    device, on fake tensors."""
    more = {**ARCHITECTURES[architecture], "max_position_embeddings": 1 << 17}
    if "sliding_window" in more:
        more["sliding_window"] = 4096
    policy = policy_of(architecture, more)
    assert policy.packing.packs and policy.head_is_enough is not None
    policy.model.to(torch.bfloat16)
    # Larger than they are on a CPU, for fewer of them.
    monkeypatch.setattr(kernels, "tiles_of", lambda *_: Tiles(1 << 26, 4096, wide_sums=device == "cuda", queries=4096))
    # It reads values; with spans in place nothing looks at what it gives.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    if device == "cuda":
        monkeypatch.setattr(microbatch, "GAIN", {})
        cost = Cost.of_layers(policy.layers, SPEEDS["H100"], False)
        monkeypatch.setattr(Cost, "of", lambda policy: cost)
    batch = one_group(4096, 2, 61440)
    trained = [rollout.sampled for rollout in batch.rollouts]
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of(device), Sizes(4097, 4097) as sizes:
        made = list(micro_batches(policy, batch, np.arange(2), trained, OptimConfig(micro_batch_tokens=65536)))
        for rows in made:
            forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", CURRENT].sum().backward()
    assert len(made) == 2 and all(rows.spans is not None for rows in made)
    assert not sizes.wrong


def test_padded_rows_of_latent_attention_have_scores_on_a_cpu():
    config = AutoConfig.for_model("deepseek_v3", num_attention_heads=4, v_head_dim=8, qk_nope_head_dim=16)
    assert head_widths(config) == (16 + 64, 8)
    policy = policy_of("deepseek_v3", ARCHITECTURES["deepseek_v3"])
    assert policy.layers.channels == 4 * (16 + 8) // 2
    assert LayerSizes.of(policy.causal_lm, "cpu").masked_beyond == 0
    assert LayerSizes.of(policy.causal_lm, "cuda").masked_beyond == math.inf
    assert LayerSizes.of(policy_of("llama", {}).causal_lm, "cpu").masked_beyond == math.inf


@pytest.mark.parametrize(
    "kind", [{"window": 100}, {"softcap": 2.0}, {"dtype": torch.bfloat16, "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("run", [256, 1024])
def test_no_tile_grows_with_the_row(kind, run):
    """Rows of 4,096 and of 16,384 tokens have tiles of one size, whether their runs are short or long."""
    found = []
    for tokens in (4096, 16384):
        spans = Spans(np.full(tokens // run, run), np.full(tokens // run, -1), torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True), Sizes(1025, 65) as sizes:
            query, key, value = (
                torch.zeros(tokens, heads, 16, dtype=kind.get("dtype", torch.float32), requires_grad=True)
                for heads in (28, 4, 4)
            )
            rule = ScoreRule(0.25, kind.get("softcap"))
            output = attend(query, key, value, spans.segments(kind.get("window")), rule)
            output.sum().backward()
        assert not sizes.wrong
        found.append(sizes.largest)
    assert 0 < found[0] == found[1] <= tiles.CPU_SCORES
