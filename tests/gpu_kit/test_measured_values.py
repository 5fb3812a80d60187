"""What the stages of the GPU kit measure is what they say: ways agree in value, counts and fits are those of a hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from gpu_kit_paths import KIT

from rlvr.policy.packing import Cost


@pytest.fixture
def stages(monkeypatch):
    """The package of the stages, importable."""
    monkeypatch.syspath_prepend(KIT)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "stages"]:
        del sys.modules[name]


@pytest.fixture
def attention(stages):
    from stages import attention

    return attention


def test_the_ways_of_attention_compute_the_same(attention):
    size, length = attention.TOY, 64
    inputs = attention.random_inputs(size, length, "cpu")
    q, k, v = (x.detach().double() for x in inputs.all)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))

    def by_hand(visible):
        scores = (q @ k.transpose(-1, -2)) / size.width**0.5
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v  # [1, heads, N, width]

    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for make, rows_first in ((attention.sdpa_causal, True), (attention.sdpa_mask, True), (attention.flex, False)):
        output = make(size, length, "cpu")(inputs)
        output = output.transpose(1, 2) if rows_first else output
        assert (output.double() - by_hand(causal)).abs().max() < 0.05, make
    for prefix in (0.0, attention.SHARED):
        shared, runs = attention.runs_of(length, prefix)
        owner = np.repeat(np.arange(len(runs) + 1), [shared, *runs])  # 0: the prompt
        sees = torch.from_numpy((owner[:, None] == owner) | ((owner == 0) & (shared > 0)))
        output = attention.library(size, length, "cpu", prefix)(inputs).transpose(1, 2)
        assert (output.double() - by_hand(causal & sees)).abs().max() < 0.05, prefix


def test_torchs_varlen_takes_what_it_is_given(attention):
    """On the meta device, which has its fake kernels: shapes forward and backward."""
    inputs = attention.random_inputs(attention.TOY, 64, "meta")
    output = attention.varlen(attention.TOY, 64, "meta")(inputs)
    assert output.shape == (64, attention.TOY.heads, attention.TOY.width)
    gradients = torch.autograd.grad(output, inputs.all, torch.empty_like(output))
    assert [g.shape for g in gradients] == [x.shape for x in inputs.all]


def test_the_constants_are_those_that_made_the_times(attention):
    size, rate = attention.TOY, 2e6
    channels = size.heads * size.width
    times = {length**2: 0.5 + 3 * channels / rate * length**2 for length in (1024, 4096, 65536)}
    found = attention.constants(size, times, rate)
    assert found["flops_per_pair_and_channel"] == pytest.approx(3, rel=1e-3)
    assert found["flops_per_call"] == pytest.approx(0.5 * rate, rel=1e-2)
    length, shared = 4096, 1024
    counted = Cost(pair=1.0, call=0.0).packed(np.asarray([shared, *[384] * 8]), np.asarray([0, *[shared] * 8]))
    assert attention.pairs(length, attention.SHARED) == counted - length


def test_flops_and_vocabulary_are_those_of_the_shape(stages):
    from stages.context import Context
    from stages.models import SHAPES, VOCABULARY, characters, load, made_up, model_section, parameters
    from stages.update import model_flops

    alphabet = characters(VOCABULARY - 6)
    assert len(set(alphabet)) == len(alphabet) == VOCABULARY - 6
    assert alphabet.encode().decode() == alphabet
    context = Context("cpu", 0.0, None)
    policy = load(model_section(context, "0.5B"))
    # toy: 2 layers; q and o 64 x 64 with q's bias, k and v 64 x 32 with biases, three matrices of 64 x 96, two norms; a last norm
    layers = 2 * (2 * 64 * 64 + 64 + 2 * (64 * 32 + 32) + 3 * 64 * 96 + 2 * 64) + 64
    assert parameters(policy) == {"layers": layers, "head": 300 * 64}
    batch = made_up(policy, rollouts=4, prompt=8, response=24, group=2)
    assert [r.group for r in batch.rollouts] == ["0", "0", "1", "1"]
    assert (batch.rollouts[0].token_ids[:8] == batch.rollouts[1].token_ids[:8]).all()
    tokens, trained = 4 * 32, 4 * 24
    pairs = 4 * 32**2 / 2
    expected = 6 * (layers * tokens + 300 * 64 * trained) + 12 * 2 * 64 * pairs
    assert model_flops(policy, batch) == pytest.approx(expected)
    heads = {name: shape["hidden_size"] // shape["heads"] for name, shape in SHAPES.items()}
    assert heads == {"0.5B": 64, "1.5B": 128, "7B": 128}


def test_shapes_have_the_parameters_of_the_models_cards(stages):
    from stages.context import Context
    from stages.models import SHAPES, model_section

    from rlvr.config import ModelConfig
    from rlvr.planner import shape_of

    context = Context("cpu", 0.0, None)
    context.toy = False
    cards = {"0.5B": 0.494e9, "1.5B": 1.544e9, "7B": 7.616e9}
    assert set(SHAPES) == set(cards)
    for name, parameters in cards.items():
        shape = shape_of(ModelConfig(**model_section(context, name)))
        assert shape.weights / 4 == pytest.approx(parameters, rel=2e-3)  # all of them in float32
