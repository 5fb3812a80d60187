"""Advantages from scores of spans: returns by hand, the steps of a group, and responses without spans."""

from __future__ import annotations

import dataclasses
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
    of_case,
    spread,
)
from rlvr.advantages import GroupAdvantage, SpanAdvantage
from rlvr.records import Segment, Verdict


def with_spans(batch, spans, widths=2):
    """Verdicts with these (start, end, score) spans; every sampled token is `widths` characters long."""
    for rollout, scored in zip(batch.rollouts, spans, strict=True):
        rollout.char_ends = np.where(rollout.sampled, (np.cumsum(rollout.sampled)) * widths, -1)
        rollout.verdicts["v"] = dataclasses.replace(Verdict.from_score(0.5), spans=tuple(scored))
    return batch


def process(**options):
    return SpanAdvantage(outcome="none", normalise="none", **options)


SPANS = [(0, 4, 0.8), (4, 6, 0.2), (6, 10, 0.5)]
"""Over five tokens of two characters: tokens 0 and 1, token 2, tokens 3 and 4."""


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [1.5, 1.5, 0.7, 0.5, 0.5]),
        ({"discount": 0.5}, [0.8 + 0.1 + 0.125, 0.8 + 0.1 + 0.125, 0.2 + 0.25, 0.5, 0.5]),
        ({"transform": ("delta",)}, [0.8, 0.8, 0.2, 0.5, 0.5]),
        ({"transform": ("clip",), "threshold": 0.6}, [-0.5, -0.5, -0.5, -0.1, -0.1]),
        ({"transform": ("clip", "delta"), "threshold": 0.6}, [0, 0, -0.4, -0.1, -0.1]),
        ({"weight": 2.0, "discount": 0.0}, [1.6, 1.6, 0.4, 1.0, 1.0]),
    ],
)
def test_returns_to_go_by_hand(options, want):
    batch = with_spans(batch_of([1.0], lengths=[5]), [SPANS])
    np.testing.assert_allclose(spread(batch, process(**options)(batch))[0], want, atol=1e-12)


def test_more_steps_never_pay_under_clip_and_delta():
    """The exploit that they are for: repeating a right step."""
    few = with_spans(batch_of([1.0], lengths=[4]), [[(0, 4, 0.9), (4, 8, 0.9)]])
    many = with_spans(batch_of([1.0], lengths=[40]), [[(i, i + 4, 0.9) for i in range(0, 80, 4)]])
    for options in ({"transform": ("clip",), "threshold": 0.5}, {"transform": ("delta",)}):
        first = [spread(b, process(**options)(b))[0][0] for b in (few, many)]
        assert first[1] <= first[0] + 1e-9
    first = [spread(b, process()(b))[0][0] for b in (few, many)]
    assert first[1] > first[0]


def test_spans_are_normalised_over_the_steps_of_a_group():
    """Four steps of scores 1, 0 | 0, 1: mean 1/2, deviation 1/2; the outcomes 1, 0 likewise."""
    batch = with_spans(batch_of([1.0, 0.0], lengths=[2, 2]), [[(0, 2, 1.0), (2, 4, 0.0)], [(0, 2, 0.0), (2, 4, 1.0)]])
    got = spread(batch, SpanAdvantage(epsilon=0.0)(batch))
    np.testing.assert_allclose(got, [[1 - 1 + 1, -1 + 1], [-1 + 1 - 1, 1 - 1]], atol=1e-12)
    # outcome on the last step: rewards 1, 1 | 0, 1 with mean 3/4
    last = spread(batch, SpanAdvantage(outcome="last", normalise="mean", discount=0.5)(batch))
    np.testing.assert_allclose(last, [[0.25 + 0.125, 0.25], [-0.75 + 0.125, 0.25]], atol=1e-12)


@given(case=cases, data=st.data())
@settings(max_examples=30, deadline=None)
def test_without_spans_it_is_the_group_advantage_on_every_token(case, data):
    batch = of_case(case)
    want = spread(batch, GroupAdvantage()(batch))
    for estimate in (SpanAdvantage(), SpanAdvantage(outcome="last"), SpanAdvantage(kind="turn")):
        got = estimate(batch)
        assert_sound(batch, got)
        for a, b in zip(spread(batch, got), want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)
    scored = [[(0, 2, float(i)), (2, 3, 0.5)] for i in range(len(case))]
    with_spans(batch, scored)
    for estimate in (SpanAdvantage(), SpanAdvantage(transform=("delta",), discount=0.9, outcome="last")):
        assert_sound(batch, estimate(batch))
        assert_ordered(estimate, batch, data.draw(st.permutations(range(len(case)))))
        assert_alone(estimate, batch, with_spans(batch_of([5.0, -2.0, math.nan], [8, 8, 9]), [SPANS, [], SPANS]))


def test_spans_by_segment_and_spans_that_fit_nothing():
    batch = with_spans(batch_of([1.0], lengths=[5]), [[*SPANS, (0, 3, 0.25), (8, 99, 0.125), (1, 2, math.nan)]])
    rollout = batch.rollouts[0]
    rollout.segments = [
        Segment("turn", PROMPT, PROMPT + 3),
        Segment("think", 0, 1),
        Segment("turn", PROMPT + 4, PROMPT + 5),
    ]
    # 0.8 + 0.2 + 0.25 end in the first turn, 0.5 + 0.125 in the second
    got = spread(batch, process(kind="turn", discount=0.0)(batch))[0]
    np.testing.assert_allclose(got, [1.25, 1.25, 1.25, 0.625, 0.625])
    rollout.char_ends = None  # nothing says where characters are: all spans end with the response
    got = spread(batch, process(discount=0.0)(batch))[0]
    np.testing.assert_allclose(got, [0.8] * 5)
    assert SpanAdvantage().smallest_group == 2
    assert process().smallest_group == 1
