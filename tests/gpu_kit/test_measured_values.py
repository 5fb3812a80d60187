"""What the stages of the GPU kit measure is what they say: ways agree in value, counts and fits are those of a hand."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from gpu_kit_paths import KIT

from attention_rows import visible
from rlvr.distributed import PlainBackend
from rlvr.monitor.metrics import METRICS
from rlvr.policy.attention import Spans
from rlvr.policy.attention_speed import SPEEDS
from rlvr.policy.microbatch import Cost


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


@pytest.mark.parametrize("name", ["Mistral-7B window", "Gemma-2-9B window", "gpt-oss-20b", "gpt-oss-20b window"])
@pytest.mark.parametrize("prefix", [0.0, 0.25])
def test_errors_of_windows_caps_and_sinks_are_seen(stages, monkeypatch, name, prefix):
    """The measured error is that of bfloat16, and grows where the library leaves out a rule of the layer."""
    from stages import family_layers

    layer = family_layers.LAYERS[name].toy()
    found = family_layers.error(layer, 64, prefix, "cpu")
    values = {key: value for key, value in found.items() if key != "kernels" and value is not None}
    assert set(values) == {"output", "query", "key", "value", *(["sinks"] if layer.sinks else [])}
    assert max(values.values()) < 0.02
    true = family_layers.computed
    without = {"window": None, "softcap": None, "sinks": False}

    for rule in [key for key, value in without.items() if getattr(layer, key) != value]:

        def computed(layer, inputs, spans, rule=rule):
            if rule == "sinks":
                inputs = dataclasses.replace(inputs, sinks=torch.full_like(inputs.sinks, -100.0).requires_grad_())
            else:
                layer = dataclasses.replace(layer, **{rule: None})
            return true(layer, inputs, spans)

        monkeypatch.setattr(family_layers, "computed", computed)
        assert family_layers.error(layer, 64, prefix, "cpu")["output"] > 10 * found["output"], rule


def test_windows_cut_in_the_rows_whose_errors_are_measured(stages):
    from stages.row_layouts import SHARED, uneven_row

    from stages import family_layers

    windows = {layer.window for layer in family_layers.LAYERS.values() if layer.window}
    assert windows == {128, 4096}
    for prefix in (0.0, SHARED):
        spans = uneven_row(family_layers.CHECKED, prefix, "cpu")
        assert spans.length.sum() == family_layers.CHECKED
        for window in windows:
            assert [part.window for part in spans.segments(window)] == [window]


@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40])
def test_pairs_of_layers_with_windows_are_counted(stages, window):
    from stages.row_layouts import uneven_row

    from stages import family_layers

    layer = family_layers.Layer(4, 2, 16, window=window)
    for prefix in (0.0, 0.25):
        spans = uneven_row(75, prefix, "cpu")
        seen = visible(spans, window)
        assert (family_layers.visible(layer, spans).numpy() == seen).all()
        assert family_layers.seen_pairs(layer, spans) == seen.sum()


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
    result = attention.constants(size, times, rate, calls=1)
    assert result["flops_per_pair_and_channel"] == pytest.approx(3, rel=1e-3)
    assert result["flops_per_call"] == pytest.approx(0.5 * rate, rel=1e-2)
    length, shared = 4096, 1024
    spans = Spans(np.asarray([shared, *[384] * 8]), np.asarray([-1, *[0] * 8]), torch.device("cpu"))
    counted = Cost(pair=1.0, call=0.0, in_blocks=False).packed(spans)
    assert attention.pairs(length, attention.SHARED) == counted - length


def test_the_constants_of_rows_with_a_shared_prompt_are_those_of_the_cost_that_is_counted_with_them(attention):
    """Such a row takes two calls, and `Cost` counts each."""
    size, rate = attention.TOY, 2e6
    channels = size.heads * size.width
    cost = Cost(pair=3.0 * channels, call=5e5, in_blocks=False)
    times = {}
    for length in (1024, 4096, 65536):
        spans = attention.shared_row(length, attention.SHARED, "cpu")
        times[attention.pairs(length, attention.SHARED)] = cost.packed(spans) / rate
        rows_own = cost.packed(spans) - 3.0 * channels * attention.pairs(length, attention.SHARED)
        assert rows_own - length == pytest.approx(2 * 5e5)  # a token costs 1 beside attention
    result = attention.constants(size, times, rate, calls=2)
    assert result["flops_per_pair_and_channel"] == pytest.approx(3, rel=1e-3)
    assert result["speed_call"] == pytest.approx(5e5, rel=1e-2)


def test_the_kit_measures_the_quantity_of_the_defaults(attention):
    """Times of an H100 with the rates from which its defaults are made: the fit gives the defaults."""
    size = attention.GPU
    # Per pair and channel: q k^T and the product with v forward, five products backward, of 2 FLOPs each.
    times = {
        pairs: 1e3 * (150e-6 + 7 * 2 * size.heads * size.width * pairs / 350e12) for pairs in (10**6, 10**7, 10**9)
    }
    forward_flops, executed = 2, 6  # of a product, for each pair of its factors
    rate = 650e12 / executed * forward_flops / 1e3
    result = attention.constants(size, times, rate, calls=1)
    assert result["speed_pair"] == pytest.approx(2.17, abs=0.01)
    assert result["speed_pair"] == pytest.approx(SPEEDS["H100"].pair, rel=1e-3)
    assert result["speed_call"] == pytest.approx(SPEEDS["H100"].call, rel=1e-2)


def test_flops_and_vocabulary_are_those_of_the_shape(stages):
    from stages.context import Context
    from stages.models import SHAPES, VOCABULARY, characters, load, made_up, model_section, parameters
    from stages.update import step

    alphabet = characters(VOCABULARY - 6)
    assert len(set(alphabet)) == len(alphabet) == VOCABULARY - 6
    assert alphabet.encode().decode() == alphabet
    context = Context("cpu", 0.0, None)
    policy = load(model_section(context, "0.5B"))
    # toy: 2 layers; q and o 64 x 64 with q's bias, k and v 64 x 32 with biases, three matrices of 64 x 96, two norms; a
    # last norm
    layers = 2 * (2 * 64 * 64 + 64 + 2 * (64 * 32 + 32) + 3 * 64 * 96 + 2 * 64) + 64
    assert parameters(policy) == {"layers": layers, "head": 300 * 64}
    batch = made_up(policy, rollouts=4, prompt=8, response=24, group=2)
    assert [r.group for r in batch.rollouts] == ["0", "0", "1", "1"]
    assert (batch.rollouts[0].token_ids[:8] == batch.rollouts[1].token_ids[:8]).all()
    _, computed = step(PlainBackend(policy), batch)
    trained = 4 * 24
    # as `mfu/update` counts: a prompt that is shared once, attention without the saving of causal masks
    shared = computed.tokens == 2 * (8 + 2 * 24)
    tokens, pairs = (2 * 56, 2 * (8**2 + 2 * 24 * 32)) if shared else (4 * 32, 4 * 32**2)
    assert computed.tokens == tokens
    assert computed.flops == pytest.approx(6 * (layers * tokens + 300 * 64 * trained) + 12 * 2 * 64 * pairs)
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


def test_a_shared_prompt_is_planned_as_one_that_is_shared(stages, monkeypatch):
    """Tokens that are computed go to the planner, for groups as for single rollouts."""
    from stages.context import Context
    from stages.models import load, made_up, model_section

    from stages import update

    policy = load(model_section(Context("cpu", 0.0, None), "0.5B"))
    asked = []
    monkeypatch.setattr(update, "planned_parts", lambda section, *sizes: asked.append(sizes) or {"all": 100.0})
    for group in (1, 8):
        batch = made_up(policy, rollouts=8, prompt=8, response=24, group=group)
        result = update.compared({}, batch, group, {"held_mib": 30.0, "peak_mib": 40.0})
        assert (result["total_mib"], result["measured_share"]) == (100.0, 0.7)
    assert asked == [(8 * 32, 8 * 24, 32), (8 + 8 * 24, 8 * 24, 32)]


def test_metrics_that_runs_keep_are_those_of_the_library(stages):
    from stages.runs import FAMILIES, KEPT

    assert set(KEPT) <= set(METRICS)
    assert [family for family in FAMILIES if not any(name.startswith(family) for name in METRICS)] == []


@pytest.fixture
def learning(stages, tmp_path):
    """`(stages.learning, make)`: `make(seconds, *chunks)` is a context with a clock of its own, and a trainer whose
    chunks of steps take so many seconds."""
    from stages.context import Context

    from stages import learning

    class Clocked(Context):
        clock = 0.0

        def seconds_left(self):
            return self.until - self.clock

    class Trainer:
        def __init__(self, context, chunks):
            self.context, self.chunks, self.rows = context, list(chunks), []

        def train(self, steps):
            self.context.clock += self.chunks.pop(0)
            self.rows += [{"reward/mean": 0.0}] * steps
            return self.rows

    def make(seconds, *chunks):
        context = Clocked("cuda", seconds, tmp_path / "results.jsonl")
        return context, Trainer(context, chunks)

    return learning, make


@pytest.mark.parametrize(
    ("seconds", "chunks", "steps"),
    [
        (240, [10, 10, 70, 70, 70], 30),  # 150 are left, less than twice the last 70 and 20 to close
        (240, [1] * 9, 40),  # the whole run
        (19, [], 0),
        (65, [25, 1], 10),  # 40 are left, less than 2 * 25 + 20
    ],
)
def test_a_run_is_cut_off_by_the_time_of_its_last_chunk(learning, seconds, chunks, steps):
    stage, make = learning
    context, trainer = make(seconds, *chunks)
    assert len(stage.trained(context, trainer, 40)) == steps
    kept = context.results.read_text().splitlines() if context.results.exists() else []
    assert [json.loads(line)["name"] for line in kept] == [f"after {n} steps" for n in range(10, steps + 1, 10)]
    assert context.seconds_left() >= 19


def test_a_run_that_was_cut_off_proves_nothing_and_fails_nothing(learning):
    from stages.context import SkipError

    stage, _ = learning
    rising, flat = [0.1] * 10 + [0.4] * 10, [0.1] * 20
    for complete in (True, False):
        assert stage.gain(rising, complete) == {"first": 0.1, "last": 0.4, "gain": 0.3}
        for few in ([], [0.1], rising[:-1]):
            with pytest.raises(SkipError, match=f"^{len(few)} steps of reinforcement"):
                stage.gain(few, complete)
    with pytest.raises(SkipError, match="the time was over"):
        stage.gain(flat, False)
    with pytest.raises(AssertionError, match=r"from 0\.100 to 0\.100 in 20 steps"):
        stage.gain(flat, True)
