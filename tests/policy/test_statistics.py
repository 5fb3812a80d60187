"""Log-probs and entropies at trained positions against a float64 copy of the model, one unpadded rollout at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from architectures import ARCHITECTURES as SIZES
from architectures import policy_of
from number_oracles import double, gap, gradient_of, token_statistics
from rlvr.core.needs import CURRENT, REFERENCE, Need
from rlvr.policy import Policy, fused_head, head_tiles, statistics
from rlvr.policy.microbatch import cut, rows_of
from rlvr.policy.model import LogitScaling, head_of
from rlvr.policy.statistics import DeferredColumns, forward
from rlvr.records import Batch, Origin

BOTH = [Need("logprobs", grad=True), Need("entropy", grad=True)]
ARCHITECTURES = ("qwen3", "llama", "gemma2", "mistral", "phi3", "qwen2", "gemma3_text", "granite", "cohere", "gpt2")
SLIDING = ("gemma2", "mistral", "gemma3_text")


def lay_out(policy, batch, index=None, trained=None):
    index = np.arange(len(batch)) if index is None else np.asarray(index)
    trained = trained or [r.sampled for r in batch.rollouts]
    return rows_of(batch, index, trained, int(policy.tokenizer.pad_token_id), policy.device)


def oracle(policy, batch, index=None, trained=None, model=None):
    """The same, token after token, in the order of the rows: (log-probs, entropies)."""
    model = model or double(policy)
    columns = [[], []]
    for i in range(len(batch)) if index is None else index:
        mask = batch.rollouts[i].sampled if trained is None else trained[i]
        for column, values in zip(columns, token_statistics(model, batch.rollouts[i]), strict=True):
            column.append(values[torch.as_tensor(mask[1:])])
    return tuple(torch.cat(column) for column in columns)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equal_to_the_models_own_logits(make_policy, make_batch, architecture):
    policy = make_policy(architecture=architecture)
    if architecture in SLIDING:
        policy.causal_lm.config.sliding_window = 4
    if architecture == "gemma2":  # so tight that a forgotten cap would show
        policy.causal_lm.config.final_logit_softcapping = 2.0
        policy.logit_scaling = LogitScaling.of(policy.causal_lm)
    assert policy.head_is_enough
    batch = make_batch(policy)
    got = forward(policy, lay_out(policy, batch), BOTH)
    logprobs, entropy = oracle(policy, batch)
    torch.testing.assert_close(got["logprobs", CURRENT].double(), logprobs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got["entropy", CURRENT].double(), entropy, rtol=1e-5, atol=2e-5)
    weights = torch.linspace(-1, 1, len(logprobs)).double()
    ours = gradient_of(policy.model, (weights * (got["logprobs", CURRENT] + got["entropy", CURRENT])).sum())
    model = double(policy)
    logprobs, entropy = oracle(policy, batch, model=model)
    assert gap(ours.double(), gradient_of(model, (weights * (logprobs + entropy)).sum())) < 1e-5


@pytest.mark.parametrize("architecture", SLIDING)
def test_the_sliding_window_is_not_idle_in_these_tests(make_policy, make_batch, architecture):
    policy = make_policy(architecture=architecture)
    batch = make_batch(policy)
    wide = oracle(policy, batch)[0]
    policy.causal_lm.config.sliding_window = 4
    assert float((oracle(policy, batch)[0] - wide).detach().abs().max()) > 1e-2


def test_every_rows_temperature_counts(policy, make_batch):
    batch = make_batch(policy, temperatures=(0.3, 2.5, 1.0))
    rows = lay_out(policy, batch)
    got = forward(policy, rows, BOTH)
    logprobs, entropy = oracle(policy, batch)
    torch.testing.assert_close(got["logprobs", CURRENT].double(), logprobs, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(got["entropy", CURRENT].double(), entropy, rtol=1e-5, atol=5e-5)
    want = [r.temperature for r in batch.rollouts for _ in range(int(r.sampled.sum()))]
    np.testing.assert_allclose(rows.temperature.numpy(), want)


def test_order_padding_and_company_change_nothing(policy, make_batch, make_rollout):
    batch = make_batch(policy)
    alone = {i: forward(policy, lay_out(policy, batch, [i]), BOTH) for i in range(len(batch))}
    longest = make_rollout(np.arange(90) % 50 + 10, prompt=2)
    more = Batch([*batch.rollouts, longest])
    for order in (np.arange(len(more)), np.random.default_rng(0).permutation(len(more))):
        rows = lay_out(policy, more, order)
        got = forward(policy, rows, BOTH)
        for name in got:
            parts = dict(zip(order, torch.split(got[name], torch.bincount(rows.row).tolist()), strict=True))
            for i, values in alone.items():
                torch.testing.assert_close(parts[i], values[name], rtol=1e-5, atol=2e-5)


def test_trained_tokens_need_not_be_the_tail(policy, make_batch):
    batch = make_batch(policy, rewards=((1.0, 0.0, 1.0),))
    rng = np.random.default_rng(5)
    trained = [np.asarray([False, *(rng.random(len(r) - 1) < 0.5)]) for r in batch.rollouts]
    trained[1][:] = False
    got = forward(policy, lay_out(policy, batch, trained=trained), BOTH)
    for values, want in zip(got.values(), oracle(policy, batch, trained=trained), strict=True):
        torch.testing.assert_close(values.double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("size", [(1, 100), (3, 7), (7, 64)])
def test_tiles_change_neither_values_nor_gradients(policy, make_batch, monkeypatch, size, grad):
    batch = make_batch(policy)
    rows = lay_out(policy, batch)
    needs = [Need("logprobs", grad=True), Need("entropy", grad=grad)]
    weights = torch.linspace(-1, 1, len(rows.targets))

    def values_and_gradient():
        got = forward(policy, rows, needs)
        assert got["entropy", CURRENT].requires_grad == grad
        total = (weights * (got["logprobs", CURRENT] + got["entropy", CURRENT])).sum()
        return got, gradient_of(policy.model, total)

    whole, gradient = values_and_gradient()
    monkeypatch.setattr(head_tiles, "KEEP", 0)
    monkeypatch.setattr(head_tiles, "TILE", size[0] * size[1])
    monkeypatch.setattr(head_tiles, "COLUMNS", size[1])
    seen = []
    real = fused_head.Logits.tile
    monkeypatch.setattr(fused_head.Logits, "tile", lambda *a: seen.append(real(*a).numel()) or real(*a))
    cut_up, gradient_cut = values_and_gradient()
    assert max(seen) <= size[0] * size[1]
    assert sum(seen) == 2 * len(rows.targets) * policy.causal_lm.config.vocab_size  # forward, and again backward
    for name in whole:
        torch.testing.assert_close(cut_up[name], whole[name], rtol=1e-6, atol=2e-6)
    assert gap(gradient_cut, gradient) < 1e-6
    with torch.no_grad():
        bare = forward(policy, rows, needs)
    for name in whole:
        assert not bare[name].requires_grad
        torch.testing.assert_close(bare[name], whole[name], rtol=1e-6, atol=2e-6)


def test_only_what_is_asked_for_is_computed(policy, make_batch):
    rows = lay_out(policy, make_batch(policy))
    assert set(forward(policy, rows, [Need("logprobs")])) == {("logprobs", CURRENT)}
    assert set(forward(policy, rows, [Need("entropy"), Need("logprobs", REFERENCE)])) == {("entropy", CURRENT)}


def test_a_model_with_an_unusual_head_goes_through_its_own_forward(make_policy, make_batch):
    policy = make_policy()
    head = policy.causal_lm.forward

    def odd(*args, **kwargs):
        output = head(*args, **kwargs)
        output.logits = output.logits * 1.5 + torch.linspace(0, 2, output.logits.shape[-1])
        return output

    policy.causal_lm.forward = odd
    assert not policy.head_is_enough
    batch = make_batch(policy)
    got = forward(policy, lay_out(policy, batch), BOTH)
    for i, want in zip(got.values(), oracle(policy, batch, model=policy.model), strict=True):
        torch.testing.assert_close(i.double(), want, rtol=1e-5, atol=2e-5)


def test_a_very_peaked_distribution_has_finite_gradients(make_policy, make_batch):
    policy = make_policy()
    batch = make_batch(policy, temperatures=(1e-3,))
    got = forward(policy, lay_out(policy, batch), BOTH)
    gradient = gradient_of(policy.model, got["entropy", CURRENT].sum() + got["logprobs", CURRENT].sum())
    assert bool(torch.isfinite(gradient).all())


EVERY = ("logprobs", "logsumexp", "mean_logit", "sum_squared_probs", "entropy")


def by_definition(logits, targets):
    """Every statistic from a float64 table of tempered logits."""
    table = torch.log_softmax(logits, -1)
    probs = table.exp()
    return {
        "logprobs": table.gather(1, targets[:, None])[:, 0],
        "logsumexp": logits.exp().sum(-1).log(),
        "mean_logit": logits.sum(-1) / logits.shape[1],
        "sum_squared_probs": (probs * probs).sum(-1),
        "entropy": -(probs * table).sum(-1),
    }


def own_logits(policy, batch):
    """A float64 copy of the model and its tempered logits at the sampled tokens, rollout after rollout."""
    model = double(policy)
    parts = [
        (model(input_ids=torch.as_tensor(r.token_ids)[None]).logits[0, :-1] / r.temperature)[
            torch.as_tensor(r.sampled[1:])
        ]
        for r in batch.rollouts
    ]
    return model, torch.cat(parts)


HEADS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "soft-cap": {"architecture": "gemma2"},
    "scaled": {"architecture": "granite"},
    "lora on the head": {"tie_word_embeddings": False, "adapter": {"r": 3, "target_modules": ["lm_head", "q_proj"]}},
    "lora elsewhere": {"adapter": {"r": 3, "target_modules": ["q_proj"]}},
}


@pytest.mark.parametrize("kind", [*HEADS, "bias", "called"])
def test_every_statistic_of_every_head(make_policy, make_batch, kind, monkeypatch):
    policy = make_policy(**HEADS.get(kind, {"tie_word_embeddings": False}))
    causal_lm = policy.causal_lm
    with torch.no_grad():
        if kind == "soft-cap":
            causal_lm.config.final_logit_softcapping = 2.0
        if kind == "scaled":
            causal_lm.config.logits_scaling = 3.0
        policy.logit_scaling = LogitScaling.of(causal_lm)
        if kind == "bias":
            causal_lm.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, causal_lm.config.vocab_size))
        if kind == "lora on the head":
            causal_lm.lm_head.lora_B["default"].weight.normal_()
    if kind == "called":  # a hook may do anything, so that the head has to be called
        causal_lm.lm_head.register_forward_hook(lambda module, args, output: output * 1.25)
        monkeypatch.setattr(statistics, "CHUNK", 5 * causal_lm.config.vocab_size)
    assert (head_of(policy, torch.zeros(2, 32)) is None) == (kind == "called")
    assert policy.head_is_enough
    batch = make_batch(policy)
    rows = lay_out(policy, batch)
    got = forward(policy, rows, [Need(name, grad=True) for name in EVERY])
    model, logits = own_logits(policy, batch)
    want = by_definition(logits, rows.targets)
    assert set(got) == {(name, CURRENT) for name in want}
    weights = torch.linspace(-1, 1, len(rows.targets)).double()
    totals = []
    for name, values in want.items():
        torch.testing.assert_close(got[name, CURRENT].double(), values, rtol=1e-5, atol=2e-5)
        totals.append([(weights * v).sum() for v in (got[name, CURRENT], values)])
    ours, right = (
        gradient_of(m, sum(t)) for m, t in zip((policy.model, model), zip(*totals, strict=True), strict=True)
    )
    assert gap(ours.double(), right) < 1e-5


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_heads_with_scales_and_caps_are_enough_in_bfloat16_too(kind, kept):
    """The model's own scales and caps are rounded there; a factor of 1.05 is not taken for rounding."""
    exact = policy_of(kind, SIZES[kind])
    policy = Policy(exact.model.to(kept), exact.tokenizer, torch.bfloat16)
    assert policy.head_is_enough
    other = Policy(exact.model, exact.tokenizer, torch.bfloat16)
    factor = other.logit_scaling.factor or 1.0
    other.logit_scaling = dataclasses.replace(other.logit_scaling, factor=1.05 * factor)
    assert not other.head_is_enough


def test_lora_dropout_on_the_head_is_that_of_one_forward_pass(make_policy, make_batch):
    """The rows of the backward pass are those of the forward pass: finite differences along the gradient agree."""
    adapter = {"r": 3, "dropout": 0.5, "target_modules": ["lm_head"]}
    policy = make_policy(tie_word_embeddings=False, adapter=adapter)
    up = policy.causal_lm.lm_head.lora_B["default"].weight
    with torch.no_grad():
        up.normal_()
    policy.model.double()
    rows = lay_out(policy, make_batch(policy))

    def total():
        torch.manual_seed(0)
        return forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", CURRENT].sum()

    assert policy.head_is_enough
    policy.model.train()
    slope = torch.autograd.grad(total(), up)[0]
    with torch.no_grad():
        up += 1e-6 * slope
        above = total()
        up -= 2e-6 * slope
        assert float((above - total()) / 2e-6) == pytest.approx(float(slope.square().sum()), rel=1e-5)


def test_an_adapter_on_the_head_that_is_off_or_merged(make_policy, make_batch):
    policy = make_policy(tie_word_embeddings=False, adapter={"r": 3, "target_modules": ["lm_head"]})
    with torch.no_grad():
        policy.causal_lm.lm_head.lora_B["default"].weight.normal_()
        rows = lay_out(policy, make_batch(policy))
        on = forward(policy, rows, [Need("logprobs")])["logprobs", CURRENT]
        with policy.model.disable_adapter():
            off = forward(policy, rows, [Need("logprobs")])["logprobs", CURRENT]
        policy.model.merge_adapter()
        merged = forward(policy, rows, [Need("logprobs")])["logprobs", CURRENT]
    assert float((on - off).abs().max()) > 0.1
    torch.testing.assert_close(merged, on, rtol=1e-5, atol=2e-5)


def test_rows_of_the_head_beyond_the_tokenizer_count(make_policy, make_batch):
    policy = make_policy()
    policy.causal_lm.resize_token_embeddings(len(policy.tokenizer) + 37)
    batch = make_batch(policy)
    got = forward(policy, lay_out(policy, batch), BOTH)
    for values, want in zip(got.values(), oracle(policy, batch), strict=True):
        torch.testing.assert_close(values.double(), want, rtol=1e-5, atol=2e-5)


def test_a_trained_first_token_is_refused(policy, make_rollout):
    batch = Batch([make_rollout([5, 6, 7], prompt=0), make_rollout([5, 6, 7, 8, 9], prompt=1)])
    with pytest.raises(Exception, match=r"position 0|no context|first token"):
        lay_out(policy, batch)


def test_rows_lay_out_what_they_say(policy, make_rollout):
    rollouts = [
        make_rollout([5, 6, 7, 8], prompt=2),
        make_rollout([9, 10], prompt=1),
        make_rollout([3, 4, 5], prompt=1),
    ]
    rollouts[2].origin[1] = Origin.TOOL
    batch = Batch(rollouts)
    rows = lay_out(policy, batch, [2, 0, 1])
    pad = policy.tokenizer.pad_token_id
    assert rows.input_ids.tolist() == [[3, 4, 5], [5, 6, 7], [9, 10, pad]]  # nothing trained comes after a last token
    assert rows.position_ids.tolist() == [[0, 1, 2]] * 3
    assert rows.row.tolist() == [0, 1, 1, 2]
    assert rows.source.tolist() == [1, 4, 5, 6]
    assert rows.targets.tolist() == [5, 7, 8, 10]
    columns = [np.arange(len(r)) + 10.0 * i for i, r in enumerate(rollouts)]
    assert rows.at_trained(columns).tolist() == [22.0, 2.0, 3.0, 11.0]
    out, other = ([np.full(len(r), np.nan, dtype=np.float32) for r in rollouts] for _ in range(2))
    later = DeferredColumns()
    later.add(rows, torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True), out)
    later.add(lay_out(policy, batch, [2]), torch.tensor([5.0]), other)
    assert np.isnan(np.concatenate(out)).all()
    later.write()
    np.testing.assert_array_equal(np.concatenate(other[:2]), np.full(6, np.nan))
    np.testing.assert_array_equal(other[2], [np.nan, np.nan, 5])
    np.testing.assert_array_equal(out[0], [np.nan, np.nan, 2, 3])
    np.testing.assert_array_equal(out[1], [np.nan, 4])
    np.testing.assert_array_equal(out[2], [np.nan, np.nan, 1])


@pytest.mark.parametrize(("size", "tokens"), [(None, None), (1, None), (3, None), (None, 1), (None, 12), (None, 1000)])
def test_a_cut_has_every_rollout_once_and_keeps_its_limits(size, tokens):
    lengths = np.asarray([5, 9, 2, 7, 7, 1, 12, 3])
    parts = cut(lengths, size, tokens)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    for part in parts:
        assert size is None or len(part) <= size
        assert tokens is None or len(part) == 1 or lengths[part].sum() <= tokens
    assert cut(lengths[:0], size, tokens) == []
