"""Log-probs and entropies at trained positions against a float64 copy of the model, one unpadded rollout at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from number_oracles import double, gap, gradient_of, token_statistics

from rlvr.needs import CURRENT, REFERENCE, Need
from rlvr.policy import statistics
from rlvr.policy.microbatch import cut, rows_of
from rlvr.policy.statistics import forward
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
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_chunks_change_neither_values_nor_gradients(policy, make_batch, monkeypatch, tokens, grad):
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
    monkeypatch.setattr(statistics, "CHUNK", tokens * policy.causal_lm.config.vocab_size)
    calls = []
    real = statistics._statistics
    monkeypatch.setattr(statistics, "_statistics", lambda *a: calls.append(len(a[2])) or real(*a))
    cut_up, gradient_cut = values_and_gradient()
    assert max(calls) == tokens
    assert sum(calls) == 2 * len(rows.targets)  # once forward, once again in the backward pass
    for name in whole:
        torch.testing.assert_close(cut_up[name], whole[name], rtol=1e-6, atol=1e-6)
    assert gap(gradient_cut, gradient) < 1e-6
    with torch.no_grad():
        bare = forward(policy, rows, needs)
    for name in whole:
        assert not bare[name].requires_grad
        torch.testing.assert_close(bare[name], whole[name], rtol=1e-6, atol=1e-6)


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


class LogitsAsTheyAre:
    head_is_enough = False


def entropy_of(logits, temperature=1.0):
    """(ours in float32, float64 oracle) of rows of logits."""
    count = len(logits)
    got = statistics._statistics(
        LogitsAsTheyAre(),
        logits,
        torch.zeros(count, dtype=torch.long),
        torch.full((count,), temperature),
        {"logprobs": True, "entropy": True},
    )
    table = torch.log_softmax(logits.double() / temperature, -1)
    torch.testing.assert_close(got["logprobs"].double(), table[:, 0], rtol=2e-7, atol=5e-5)
    return got["entropy"].double(), -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("vocabulary", [2, 100, 5000])
def test_entropy_of_moderate_logits(vocabulary):
    torch.manual_seed(0)
    ours, want = entropy_of(2 * torch.randn(50, vocabulary))
    torch.testing.assert_close(ours, want, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize(("offset", "temperature"), [(100.0, 1.0), (-100.0, 1.0), (0.0, 0.05), (20.0, 0.1)])
def test_entropy_of_large_logits(offset, temperature):
    torch.manual_seed(0)
    ours, want = entropy_of(3 * torch.randn(200, 100) + offset, temperature)
    assert float(ours.min()) >= -1e-6
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=2e-5)


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
    assert rows.input_ids.tolist() == [[3, 4, 5, pad], [5, 6, 7, 8], [9, 10, pad, pad]]
    assert rows.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert rows.row.tolist() == [0, 1, 1, 2]
    assert rows.column.tolist() == [2, 2, 3, 1]
    assert rows.targets.tolist() == [5, 7, 8, 10]
    columns = [np.arange(len(r)) + 10.0 * i for i, r in enumerate(rollouts)]
    assert rows.gather(columns).tolist() == [22.0, 2.0, 3.0, 11.0]
    out = [np.full(len(r), np.nan, dtype=np.float32) for r in rollouts]
    rows.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0]), out)
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
