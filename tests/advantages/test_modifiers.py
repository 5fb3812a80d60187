"""Modifiers against loops and hand-worked numbers: neutral settings, order, other groups, both forms of advantage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advantage_helpers import PROMPT, assert_ordered, assert_sound, batch_of, cases, deviation, mean, of_case, spread
from rlvr import registry
from rlvr.advantages import (
    Clip,
    Entropy,
    GroupAdvantage,
    Length,
    Outliers,
    Whiten,
    informative,
)
from rlvr.errors import ConfigError
from rlvr.recipes.noisy_verifier_corrections.noise import Noise
from rlvr.recipes.psr.signs import Signs
from rlvr.recipes.rl_plus.surprise import Surprise
from rlvr.recipes.ucas.confidence import Confidence

NEUTRAL = [
    Clip(None, None),
    Signs(),
    Length(0.0),
    Noise(),
    Surprise(0.0),
    Entropy(0.0),
    Outliers(1e9),
    Confidence(0.0, 0.0, 0.0),
]
ALL = [
    *NEUTRAL,
    Clip(-0.5, 0.1),
    Signs(0.1, 2.0),
    Length(),
    Length(-0.5),
    Whiten(),
    Whiten("responses"),
    Whiten(shift=False),
]
ALL += [
    Outliers(1.0),
    informative,
    Noise("backward", 0.1, 0.2),
    Noise("forward", 0.0, 0.3),
    Surprise(2.0, False),
    Entropy(),
]
ALL += [Confidence()]


def by_token(batch, advantage):
    """An advantage that differs from token to token, 0 where it must be."""
    return [
        np.where(r.sampled, a * np.linspace(1, 2, len(r)), 0.0) for r, a in zip(batch.rollouts, advantage, strict=True)
    ]


@given(case=cases)
@settings(max_examples=30, deadline=None)
def test_a_neutral_setting_changes_nothing(case):
    batch = of_case(case)
    plain = GroupAdvantage()(batch)
    for modifier in NEUTRAL:
        for before in (plain, by_token(batch, plain)):
            if isinstance(before, list) and getattr(modifier, "per_response", False):
                continue
            after = modifier(batch, before)
            for a, b in zip(spread(batch, after), spread(batch, before), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("modifier", ALL, ids=lambda modifier: getattr(modifier, "__name__", str(modifier)))
@given(case=cases, data=st.data())
@settings(max_examples=12, deadline=None)
def test_sound_in_any_order_and_in_both_forms(modifier, case, data):
    batch = of_case(case)
    order = data.draw(st.permutations(range(len(case))))

    def whole(b):
        advantage = GroupAdvantage("mean", "none")(b)
        # What is 0 but for the rounding of a mean may have either sign, by which some modifiers choose.
        return modifier(b, np.where(np.abs(advantage) < 1e-12, 0.0, advantage))

    assert_sound(batch, whole(batch))
    assert_ordered(whole, batch, order)
    if not getattr(modifier, "per_response", False):
        assert_sound(batch, modifier(batch, by_token(batch, GroupAdvantage()(batch))))
        assert_ordered(lambda b: modifier(b, by_token(b, GroupAdvantage()(b))), batch, order)


@pytest.mark.parametrize("modifier", ALL, ids=lambda modifier: getattr(modifier, "__name__", str(modifier)))
def test_edge_cases(modifier):
    for rewards, lengths in (
        ([], []),
        ([math.nan] * 3, [2] * 3),
        ([1.0], [0]),
        ([1.0, math.nan], [3, 0]),
        ([0.1] * 4, [0] * 4),
    ):
        batch = batch_of(rewards, lengths=lengths)
        assert_sound(batch, modifier(batch, GroupAdvantage("none", "none")(batch)))
    batch = batch_of(np.random.default_rng(0).choice([0.0, 1.0, math.nan], 500), lengths=[i % 7 for i in range(500)])
    assert_sound(batch, modifier(batch, GroupAdvantage()(batch)))


def test_by_hand():
    batch = batch_of([1.0, 0.0, 0.5, math.nan], lengths=[1, 3, 2, 9])
    advantage = np.asarray([2.0, -1.0, 0.5, 0.0])
    np.testing.assert_array_equal(Clip(-0.5, 1.0)(batch, advantage), [1, -0.5, 0.5, 0])
    np.testing.assert_allclose(Length()(batch, advantage), [1.0, -1.5, 0.5, 0])  # the mean length is 2
    np.testing.assert_allclose(Length(-1.0)(batch, advantage), [4.0, -2 / 3, 0.5, 0])
    zero = np.asarray([2.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(informative(batch, zero), [6.0, 0, 0, 0])  # three decided, one of them teaches


@pytest.mark.parametrize(("over", "unbiased"), [("tokens", False), ("tokens", True), ("responses", False)])
@given(case=cases)
@settings(max_examples=20, deadline=None)
def test_whitening_equals_a_loop(over, unbiased, case):
    """REINFORCE++ with its baseline: group mean, then the batch's mean and standard deviation over tokens."""
    batch = of_case(case)
    centred = GroupAdvantage("mean", "none")(batch)
    got = Whiten(over, unbiased=unbiased, epsilon=0.0)(batch, centred)
    values = [
        a
        for a, (r, _, n) in zip(centred, case, strict=True)
        if math.isfinite(r)
        for _ in range(n if over == "tokens" else 1)
    ]
    for a, g, (r, _, n) in zip(centred, got, case, strict=True):
        if not math.isfinite(r) or not values or max(values) == min(values):
            assert g == 0 or n == 0
        elif n:
            assert g == pytest.approx((a - mean(values)) / deviation(values, unbiased), rel=1e-9, abs=1e-9)
    tokens = Whiten(unbiased=unbiased, epsilon=0.0)(
        batch, [np.full(len(r), a) for r, a in zip(batch.rollouts, centred, strict=True)]
    )
    if over == "tokens":
        for a, b in zip(spread(batch, tokens), spread(batch, got), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_outliers():
    batch = batch_of([0.0] * 9 + [1.0])
    advantage = np.asarray([0.1, -0.1] * 4 + [0.0, 5.0])
    got = Outliers(2.0)(batch, advantage)
    np.testing.assert_array_equal(got, [*advantage[:9], 0.0])
    np.testing.assert_array_equal(Outliers(3.1)(batch, advantage), advantage)
    tokens = Outliers(2.0)(batch, [np.full(len(r), a) for r, a in zip(batch.rollouts, advantage, strict=True)])
    np.testing.assert_allclose(spread(batch, tokens), np.repeat(got[:, None], 3, axis=1))


@given(case=cases, scale=st.floats(0, 2), bound=st.floats(1.1, 5))
@settings(max_examples=25, deadline=None)
def test_entropy_equals_a_loop_and_never_turns_a_sign(case, scale, bound):
    batch = of_case(case)
    before = GroupAdvantage()(batch)
    got = spread(batch, Entropy(scale, bound)(batch, before))
    for values, entropy, a in zip(got, batch.token_columns["entropy/current"], before, strict=True):
        for value, h in zip(values, entropy[PROMPT:].tolist(), strict=True):
            assert value == pytest.approx(a + min(scale * h, abs(a) / bound), rel=1e-9, abs=1e-12)
            assert np.sign(value) == np.sign(a)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"name": "clip", "low": 0.5}, "must hold 0"),
        ({"name": "clip", "high": -1}, "must hold 0"),
        ({"name": "noise", "false_positive": 0.6, "false_negative": 0.5}, "their sum below 1"),
        ({"name": "noise", "false_negative": -0.1}, "at least 0"),
        ({"name": "entropy", "bound": 1.0}, "turn negative advantages positive"),
        ({"name": "whitten"}, "did you mean 'whiten'|whiten"),
    ],
)
def test_bad_options_are_refused(spec, says):
    with pytest.raises(ConfigError, match=says):
        registry.build("modifier", spec)


@pytest.mark.parametrize("kind", ["advantage", "modifier"])
def test_every_piece_takes_an_empty_batch(kind):
    """As where a selector leaves no group: an empty answer in the form that the piece gives, per response or per
    token."""
    from rlvr import registry
    from rlvr.records import Batch

    statistics = {
        f"{name}/current": [] for name in ("logprobs", "entropy", "sum_squared_probs", "logsumexp", "mean_logit")
    }
    empty = Batch([], {name: np.empty(0) for name in ("reward", "baseline", "reward/last_token")}, statistics)
    for name in registry.names(kind):
        piece = registry.build(kind, name)
        if kind == "advantage":
            assert len(piece(empty)) == 0, name
            continue
        forms = [np.empty(0)] + ([] if getattr(piece, "per_response", False) else [[]])
        for form in forms:
            got = piece(empty, form)
            assert len(got) == 0, name
            assert isinstance(got, list) >= isinstance(form, list), name
