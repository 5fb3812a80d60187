"""The posterior of KL-regularised reinforcement learning: enumeration, the variational identity, and the optimum."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rlvr.analysis.posterior import posterior_gap, posterior_of, posterior_table, responses
from rlvr.errors import ConfigError

PROMPT = [3, 5]


def scored_alone(policy, response):
    """The log-prob of one response by one pass over prompt and response together, in float64."""
    ids = torch.tensor([[*PROMPT, *response]])
    with torch.no_grad():
        logits = policy.model(ids).logits[0].double()
    rows = logits.log_softmax(-1)
    return sum(rows[len(PROMPT) - 1 + n, token].item() for n, token in enumerate(response))


def test_responses_are_all_there_are_and_their_probabilities_sum_to_1(make_policy):
    policy = make_policy(alphabet="0123=")
    vocabulary = policy.causal_lm.config.vocab_size
    (end,) = policy.end_ids
    found = dict(responses(policy, PROMPT, 2))
    others = [token for token in range(vocabulary) if token != end]
    assert set(found) == {(end,), *itertools.product(others, range(vocabulary))}
    assert math.fsum(map(math.exp, found.values())) == pytest.approx(1.0, abs=1e-6)
    for response in [(end,), (others[0], end), (others[1], others[2])]:
        assert found[response] == pytest.approx(scored_alone(policy, response), abs=1e-5)


def test_too_many_responses_are_refused_before_they_are_made(make_policy):
    with pytest.raises(ConfigError, match="more than 400000 responses of at most 9 tokens"):
        list(responses(make_policy(alphabet="0123456789=? "), PROMPT, 9))


@pytest.fixture
def distributions():
    """pi0, another policy, and rewards of 40 responses, from a generator."""
    random = np.random.default_rng(1)
    base, policy = (np.log(random.dirichlet(np.ones(40))) for _ in range(2))
    return base, policy, random.choice([0.0, 0.5, 1.0], size=40)


def test_the_posterior_is_bayes_rule(distributions):
    """The worked case of two responses, and the rule in plain numbers for the others."""
    half = np.log([0.5, 0.5])
    posterior, log_z = posterior_of(half, np.array([1.0, 0.0]), 0.5)
    # pi*(first) = e^2 / (e^2 + 1).
    assert math.exp(posterior[0]) == pytest.approx(math.e**2 / (math.e**2 + 1))
    assert log_z == pytest.approx(math.log(0.5 * math.e**2 + 0.5))
    base, _, reward = distributions
    evidence = [math.exp(b) * math.exp(r / 0.3) for b, r in zip(base, reward, strict=True)]
    expected = [one / math.fsum(evidence) for one in evidence]
    assert np.exp(posterior_of(base, reward, 0.3)[0]) == pytest.approx(expected)


def test_binary_rewards_keep_the_odds_within_right_responses_and_move_the_others_by_1_over_beta(distributions):
    base, _, _ = distributions
    reward = np.zeros(40)
    reward[:10] = 1.0
    posterior, _ = posterior_of(base, reward, 0.25)
    assert posterior[3] - posterior[7] == pytest.approx(base[3] - base[7])
    assert (posterior[3] - posterior[20]) - (base[3] - base[20]) == pytest.approx(4.0)


@pytest.mark.parametrize("beta", [0.05, 0.5, 5.0])
def test_the_objective_is_the_bound_less_beta_times_the_divergence_to_the_posterior(distributions, beta):
    base, policy, reward = distributions
    gap = posterior_gap(policy, base, reward, beta)
    terms = [(math.exp(p), r, p - b, b + r / beta) for p, b, r in zip(policy, base, reward, strict=True)]
    log_z = math.log(math.fsum(math.exp(tilted) for *_, tilted in terms))
    objective = math.fsum(q * (r - beta * ratio) for q, r, ratio, _ in terms)
    divergence = math.fsum(math.exp(p) * (p - (t[3] - log_z)) for p, t in zip(policy, terms, strict=True))
    assert gap.objective == pytest.approx(objective) and gap.bound == pytest.approx(beta * log_z)
    assert gap.gap == pytest.approx(divergence)
    assert objective == pytest.approx(beta * log_z - beta * divergence)


def test_no_policy_has_a_larger_objective_than_the_posterior(distributions):
    base, _, reward = distributions
    posterior, log_z = posterior_of(base, reward, 0.4)
    best = posterior_gap(posterior, base, reward, 0.4)
    assert best.objective == pytest.approx(0.4 * log_z) and best.gap == pytest.approx(0.0, abs=1e-12)
    random = np.random.default_rng(2)
    for scale in (1e-3, 0.1, 1.0):
        moved = posterior + scale * random.standard_normal(40)
        moved -= np.log(np.exp(moved).sum())
        assert posterior_gap(moved, base, reward, 0.4).objective < best.objective
    # Without the KL term all weight goes to one best response: the collapse, whose entropy is 0.
    greedy = np.full(40, -1e3)
    greedy[int(reward.argmax())] = 0.0
    collapsed = posterior_gap(greedy, base, reward, 0.4)
    assert collapsed.reward == 1.0 and collapsed.entropy == 0.0 and collapsed.objective < best.objective


def test_the_table_has_pi0_first_and_the_posterior_last(make_policy):
    policies = {"base": make_policy(alphabet="0123="), "other": make_policy(seed=1, alphabet="0123=")}
    right = {2, 4}

    def rewards(number, found):
        assert number in (0, 1)
        return np.array([float(response[0] in right) for response in found])

    table = posterior_table(policies, [PROMPT, [4]], rewards, 2, 0.5)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["base", "other", "posterior"]
    assert rows["base"]["KL to base"] == 0.0 and rows["posterior"]["KL to posterior"] == pytest.approx(0, abs=1e-9)
    assert all(row["largest error"] < 1e-6 for row in rows.values())
    assert rows["other"]["J"] < rows["posterior"]["J"] == pytest.approx(rows["base"]["beta log Z"])
    with pytest.raises(ConfigError, match="without a KL term there is no posterior"):
        posterior_table(policies, [PROMPT], rewards, 1, 0.0)
    with pytest.raises(ConfigError, match="other has another vocabulary"):
        posterior_table(policies | {"other": make_policy(alphabet="0123456=")}, [PROMPT], rewards, 1, 0.5)
