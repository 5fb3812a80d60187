"""The optimal token baseline against a loop over positions, at equal weights and at its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import (
    PROMPT,
    assert_alone,
    assert_ordered,
    assert_sound,
    batch_of,
    cases,
    members,
    of_case,
    spread,
)
from rlvr.advantages import GroupAdvantage, OptimalTokenBaseline


def optimal_token(batch, case, tail):
    """Position by position."""
    rewards, groups, lengths = zip(*case, strict=True)
    logprobs, squares = (batch.token_columns[f"{n}/current"] for n in ("logprobs", "sum_squared_probs"))
    result = []
    for i, (r, _, length) in enumerate(case):
        values = []
        for t in range(length):
            if not math.isfinite(r):
                values.append(0.0)
                continue
            reach = [j for j in members(rewards, groups, i) if lengths[j] > t]
            if len(reach) == 1:
                values.append(r if tail == "reward" else 0.0)
                continue
            w = {
                j: sum(
                    max(0.0, 1 - 2 * math.exp(logprobs[j][PROMPT + u]) + squares[j][PROMPT + u]) for u in range(t + 1)
                )
                for j in reach
            }
            if sum(w.values()) == 0:  # no token has a gradient: all count alike
                w = dict.fromkeys(reach, 1.0)
            values.append(r - sum(w[j] * rewards[j] for j in reach) / sum(w.values()))
        result.append(values)
    return result


@pytest.mark.parametrize("tail", ["reward", "none"])
@given(case=cases, data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_optimal_token_baseline_equals_a_loop(tail, case, data):
    batch, estimate = of_case(case), OptimalTokenBaseline(tail)
    got = estimate(batch)
    assert_sound(batch, got)
    for values, want in zip(spread(batch, got), optimal_token(batch, case, tail), strict=True):
        np.testing.assert_allclose(values, want, rtol=1e-9, atol=1e-9)
    order = data.draw(st.permutations(range(len(case))))
    assert_ordered(estimate, batch, order)
    assert_alone(estimate, batch, batch_of([5.0, -2.0, math.nan], [8, 8, 9]))


def test_the_optimal_token_baseline_with_equal_weights_is_the_mean():
    batch = batch_of([1.0, 0.0, 0.0, 1.0, 0.1, 0.1, 0.1], [0, 0, 0, 0, 1, 1, 1], [3] * 7)
    for name, value in (("logprobs", -1.0), ("sum_squared_probs", 0.3)):
        batch.token_columns[f"{name}/current"] = [np.where(r.sampled, value, np.nan) for r in batch.rollouts]
    got, plain = OptimalTokenBaseline()(batch), GroupAdvantage("mean", "none")(batch)
    for values, a in zip(spread(batch, got), plain, strict=True):
        np.testing.assert_allclose(values, a, atol=1e-12)
        assert a != 0 or not any(values)


def test_the_optimal_token_baseline_at_certainty_and_edges():
    batch = batch_of([1.0, 0.0], lengths=[2, 2])
    for name, value in (("logprobs", 0.0), ("sum_squared_probs", 1.0)):  # no gradient at all: the plain mean
        batch.token_columns[f"{name}/current"] = [np.where(r.sampled, value, np.nan) for r in batch.rollouts]
    assert spread(batch, OptimalTokenBaseline()(batch)) == [[0.5, 0.5], [-0.5, -0.5]]
    for rewards, lengths in (([], []), ([math.nan] * 2, [3, 3]), ([1.0, 1.0], [0, 0])):
        empty = batch_of(rewards, lengths=lengths)
        assert not any(any(v) for v in spread(empty, OptimalTokenBaseline()(empty)))
