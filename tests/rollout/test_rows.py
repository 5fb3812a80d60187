import math

import numpy as np
import pytest
import torch
from engine_helpers import kept
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.rollout.rows import draw, truncate, uniforms

LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=24)
NEARLY_ONE = math.nextafter(1.0, 0.0)


def softmax(logits):
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def truncated(logits, top_k=0, top_p=1.0, min_p=0.0):
    rows = torch.tensor([logits], dtype=torch.float32)
    options = [torch.tensor([float(x)], dtype=torch.float32) for x in (top_k, top_p, min_p)]
    return truncate(rows, *options)[0]


def how_many(logits, slack, top_k, top_p, min_p):
    """How many tokens are left, with the thresholds that rounding may cross moved by `slack`."""
    return len(kept(softmax(logits), top_k, min(top_p + slack, 1.0) if top_p < 1 else 1.0, min_p * (1 - slack)))


@given(
    LOGITS,
    st.integers(0, 30),
    st.floats(1 / 64, 1.0, width=32),
    st.floats(0.0, 1.0, width=32, allow_subnormal=False),
    st.sets(st.sampled_from(["k", "p", "m"])),
)
@settings(max_examples=300, deadline=None)
def test_truncation_keeps_the_likeliest_tokens_that_the_definitions_keep(logits, top_k, top_p, min_p, used):
    options = (top_k if "k" in used else 0, top_p if "p" in used else 1.0, min_p if "m" in used else 0.0)
    result = truncated(logits, *options)
    left = torch.isfinite(result)
    count = int(left.sum())
    assert how_many(logits, -1e-5, *options) <= count <= how_many(logits, 1e-5, *options)
    assert count >= 1
    values = torch.tensor(logits, dtype=torch.float32)
    assert torch.equal(result[left], values[left])  # what is kept is kept as it was
    assert torch.equal(values[left].sort(descending=True).values, values.sort(descending=True).values[:count])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 1}, {1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.55}, {1, 3}),
        ({"top_p": 0.85}, {1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.35}, {1, 2, 3}),
        ({"min_p": 0.4}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.55}, {1}),  # 0.5 / 0.9 is over 0.55
        ({"top_k": 3, "top_p": 0.56}, {1, 3}),
        ({"top_k": 1, "top_p": 0.9, "min_p": 0.1}, {1}),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.4}, {1, 3}),
        ({"top_k": 3, "top_p": 0.79}, {1, 3}),  # 0.72 / 0.9 is 0.8; over all four tokens it would take three
        ({"min_p": 0.4, "top_p": 0.6}, {1}),  # 0.5 / 0.72
        ({}, {0, 1, 2, 3}),
    ],
)
def test_a_case_worked_by_hand(options, expected):
    logits = [math.log(p) for p in (0.1, 0.5, 0.18, 0.22)]
    assert set(torch.nonzero(torch.isfinite(truncated(logits, **options))).flatten().tolist()) == expected


def test_rows_are_truncated_by_their_own_options_only():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 12, generator=generator) * 3
    top_k = torch.tensor([0.0, 3, 0, 0, 5, 1])
    top_p = torch.tensor([1.0, 1, 0.6, 1, 0.9, 0.2])
    min_p = torch.tensor([0.0, 0, 0, 0.3, 0.05, 0.9])
    together = truncate(logits, top_k, top_p, min_p)
    assert torch.equal(together[0], logits[0])
    for i in range(6):
        alone = truncate(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1], min_p[i : i + 1])[0]
        assert torch.equal(together[i], alone)


def test_a_row_that_has_one_token_left_keeps_it():
    row = [-math.inf, 2.0, -math.inf]
    result = truncated(row, top_k=2, top_p=0.5, min_p=0.5)
    assert torch.isfinite(result).tolist() == [False, True, False]


@given(LOGITS, st.floats(0.25, 4.0, width=32), st.integers(0, 10))
@settings(max_examples=100, deadline=None)
def test_the_share_of_a_token_over_all_uniforms_is_its_probability(logits, temperature, hidden):
    """Inverse CDF: over an even grid of N uniforms a token is drawn N p times, give or take the two edges."""
    count = 2000
    row = torch.tensor(logits, dtype=torch.float32)
    row[torch.arange(len(row)) % 11 == hidden] = -torch.inf
    if not bool(torch.isfinite(row).any()):
        row[0] = 0.0
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = draw(row.expand(count, -1), torch.full((count,), temperature), grid)
    expected = torch.softmax(row.double() / temperature, -1)
    shares = torch.bincount(tokens, minlength=len(row)) / count
    assert float((shares - expected).abs().max()) <= 1 / count + 1e-5
    assert torch.allclose(logprobs.double(), expected.log()[tokens], atol=1e-4)
    assert bool((tokens.diff() >= 0).all())


@given(st.lists(st.booleans(), min_size=1, max_size=12).filter(any), st.floats(0, NEARLY_ONE, allow_subnormal=False))
@settings(max_examples=200, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(possible, u):
    row = torch.where(torch.tensor(possible), 0.3, -torch.inf)
    uniform = torch.tensor([0.0, u, NEARLY_ONE], dtype=torch.float64)
    tokens, logprobs = draw(row.expand(3, -1), torch.ones(3), uniform)
    assert all(possible[t] for t in tokens.tolist())
    assert torch.allclose(logprobs, torch.tensor(-math.log(sum(possible))), atol=1e-6)


@given(st.integers(0, 10_000), st.sampled_from([255, 256, 257, 700, 1024, 3000]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_large_vocabulary_is_searched_in_blocks_with_the_same_result(seed, vocabulary, sparse):
    """Against a running sum over all tokens; where rounding may decide, the token before or after is as good."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, 4, (8, vocabulary))).float()
    if sparse:  # whole blocks of probability 0, the first and the last among them
        logits[:, random.permutation(vocabulary)[3:]] = -torch.inf
    uniform = torch.from_numpy(np.append(random.random(6), [0.0, NEARLY_ONE]))
    tokens, logprobs = draw(logits, None, uniform)
    weights = np.exp(logits.double().numpy())
    after = weights.cumsum(-1) / weights.sum(-1, keepdims=True)
    for row, token in enumerate(tokens.tolist()):
        chance = weights[row, token] / weights[row].sum()
        assert chance > 0
        assert after[row, token] - chance - 1e-6 <= uniform[row] <= after[row, token] + 1e-6
        assert logprobs[row].item() == pytest.approx(math.log(chance), abs=1e-5)


def test_logits_that_are_not_numbers_give_a_token_without_a_log_prob():
    for vocabulary in (19, 700):
        tokens, logprobs = draw(torch.full((2, vocabulary), torch.nan), None, torch.tensor([0.2, 0.9]).double())
        assert bool(((tokens >= 0) & (tokens < vocabulary)).all())
        assert bool(logprobs.isnan().all())


def test_random_uniforms_give_the_probabilities():
    row, count = torch.tensor([0.0, 1.0, -1.0, 2.0]), 20_000
    tokens, _ = draw(row.expand(count, -1), torch.full((count,), 1.5), uniforms(3, count))
    shares = np.bincount(tokens.numpy(), minlength=4) / count
    assert np.abs(shares - np.asarray(softmax((row / 1.5).tolist()))).max() < 0.015  # four standard errors


def test_temperature_zero_takes_the_likeliest_token_with_its_log_prob_at_one():
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1)) * 4
    uniform = uniforms(0, 50)
    temperature = torch.where(torch.arange(50) % 2 == 0, 0.0, 0.7)
    tokens, logprobs = draw(logits, temperature, uniform)
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    at_one = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None]).squeeze(-1)
    at_temperature = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, tokens[:, None]).squeeze(-1)
    assert torch.allclose(logprobs[::2].double(), at_one[::2], atol=1e-5)
    assert torch.allclose(logprobs[1::2].double(), at_temperature[1::2], atol=1e-5)
    assert logprobs.dtype == torch.float32
    assert tokens.dtype == torch.int64


def test_a_row_draws_the_same_alone_and_among_others():
    logits = torch.randn(33, 50, generator=torch.Generator().manual_seed(2)) * 3
    temperature, uniform = torch.linspace(0.0, 2.0, 33), uniforms(5, 33)
    tokens, logprobs = draw(logits, temperature, uniform)
    for i in range(33):
        token, logprob = draw(logits[i : i + 1], temperature[i : i + 1], uniform[i : i + 1])
        assert token.item() == tokens[i].item()
        assert logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)


@given(st.integers(0, 2**63 - 1), st.integers(1, 70), st.integers(0, 70))
@settings(max_examples=60, deadline=None)
def test_uniforms_depend_on_the_seed_and_not_on_how_many_are_asked_for(seed, count, more):
    few, many = uniforms(seed, count), uniforms(seed, count + more)
    assert torch.equal(few, many[:count])
    assert 0 <= float(few.min()) <= float(few.max()) < 1
    assert few.dtype == torch.float64
    assert not torch.equal(many, uniforms(seed ^ 1, count + more))
