"""The advantage `spans` over reward terms: several streams by loops in plain Python, and what holds whatever they
are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from advantage_helpers import (
    PROMPT,
    assert_alone,
    assert_ordered,
    assert_sound,
    batch_of,
    cases,
    deviation,
    mean,
    of_case,
    spread,
)
from rlvr import registry
from rlvr.advantages import GroupAdvantage, SpanAdvantage
from rlvr.config import Config
from rlvr.core.span_rewards import SpanRewards, span_scores
from rlvr.errors import ConfigError
from rlvr.records import Origin, Segment


def with_stream(batch, name, scored, weight=1.0):
    """Spans (first, past-the-end, score), counted from the first sampled token, as the term `name` gives them."""
    for rollout, own in zip(batch.rollouts, scored, strict=True):
        spans = span_scores([(PROMPT + a, PROMPT + b) for a, b, _ in own], [s for *_, s in own])
        rollout.spans[name] = spans.__class__(spans.start, spans.end, spans.score, weight)
    return batch


def alone(name="p", **options):
    return SpanAdvantage(terms={name: 1.0}, outcome="none", **{"normalise": "none", **options})


SPANS = [(0, 2, 0.8), (2, 3, 0.2), (3, 5, 0.5)]
"""Over five tokens."""


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [1.5, 1.5, 0.7, 0.5, 0.5]),
        ({"credit": "own"}, [0.8, 0.8, 0.2, 0.5, 0.5]),
        ({"credit": "block"}, [1.5] * 5),
        ({"discount": 0.5}, [0.8 + 0.1 + 0.125, 0.8 + 0.1 + 0.125, 0.2 + 0.25, 0.5, 0.5]),
        # Each score is at the last token of its step: tokens 1, 2 and 4.
        ({"discount": 0.5, "per": "token"}, [0.4 + 0.05 + 0.03125, 0.8 + 0.1 + 0.0625, 0.2 + 0.125, 0.25, 0.5]),
        ({"transform": ("delta",)}, [0.8, 0.8, 0.2, 0.5, 0.5]),
        ({"transform": ("clip",), "threshold": 0.6, "credit": "own"}, [0, 0, -0.4, -0.1, -0.1]),
        ({"weight": 2.0, "discount": 0.0}, [1.6, 1.6, 0.4, 1.0, 1.0]),
    ],
)
def test_one_stream_by_hand(options, want):
    batch = with_stream(batch_of([1.0], lengths=[5]), "p", [SPANS])
    np.testing.assert_allclose(spread(batch, alone(**options)(batch))[0], want, atol=1e-12)


def test_gaps_and_overlaps():
    """Own credit reaches the tokens of a span alone, and a token in two spans has both; to go, a token before a span
    leads to it."""
    batch = with_stream(batch_of([1.0], lengths=[6]), "p", [[(1, 3, 1.0), (2, 4, 10.0)]])
    np.testing.assert_allclose(spread(batch, alone(credit="own")(batch))[0], [0, 1, 11, 10, 0, 0])
    np.testing.assert_allclose(spread(batch, alone()(batch))[0], [11, 11, 11, 10, 0, 0])


def test_one_span_at_the_end_is_the_group_advantage_to_the_last_bit():
    rng = np.random.default_rng(0)
    rewards = rng.normal(0.3, 1.7, 40)
    rewards[[3, 17]] = math.nan
    groups = rng.integers(0, 7, 40).tolist()
    lengths = rng.integers(1, 9, 40).tolist()
    whole = [[(0, n, r)] for n, r in zip(lengths, rewards, strict=True)]
    last = [[(n - 1, n, r)] for n, r in zip(lengths, rewards, strict=True)]
    for normalise, baseline, scale in (
        ("std", "mean", "std"),
        ("mean", "mean", "none"),
        ("leave_one_out", "leave_one_out", "none"),
        ("none", "none", "none"),
    ):
        batch = batch_of(rewards, groups, lengths)
        want = spread(batch, GroupAdvantage(baseline, scale)(batch))
        for spans, credit in ((whole, "own"), (whole, "block"), (whole, "to_go"), (last, "to_go"), (last, "block")):
            for among in ("group", "place"):
                got = alone(normalise=normalise, credit=credit, among=among)(with_stream(batch, "p", spans))
                assert spread(batch, got) == want, (normalise, credit, among)


def hand_written(batch, streams, outcome):
    """Per token and stream by loops: normalise, then credit. `streams`: (name, weight, credit, discount, normalise,
    among)."""
    rewards = batch.column("reward").tolist()
    groups = [rollout.group for rollout in batch.rollouts]
    result = [[0.0] * len(r) for r in batch.rollouts]
    for name, weight, credit, discount, normalise, among in streams:
        of_all = []
        for i, rollout in enumerate(batch.rollouts):
            spans = rollout.spans[name]
            triples = sorted(zip(spans.end.tolist(), spans.start.tolist(), spans.score.tolist(), strict=True))
            of_all.append([(start, end, score) for end, start, score in triples] if math.isfinite(rewards[i]) else [])
        for i, rollout in enumerate(batch.rollouts):
            credits = []
            for k, (start, end, score) in enumerate(of_all[i]):
                peers = [
                    s
                    for j, spans in enumerate(of_all)
                    for m, (_, _, s) in enumerate(spans)
                    if groups[j] == groups[i] and not math.isnan(s) and (among == "group" or m == k)
                ]
                if math.isnan(score):
                    value = math.nan
                elif normalise == "none":
                    value = score
                elif normalise == "leave_one_out":
                    value = score - (sum(peers) - score) / (len(peers) - 1) if len(peers) > 1 else 0.0
                else:
                    spread_of = deviation(peers)
                    value = (score - mean(peers)) / (spread_of + 1e-4 if normalise == "std" and spread_of else 1.0)
                credits.append((start, end, value))
            for t in range(len(rollout)):
                if not rollout.sampled[t] or any(s <= t < e and math.isnan(v) for s, e, v in credits):
                    continue
                coming = [(k, s, v) for k, (s, e, v) in enumerate(credits) if e > t]
                for k, s, v in coming:
                    if math.isnan(v):
                        continue
                    if credit == "to_go":
                        result[i][t] += weight * discount ** (k - coming[0][0]) * v
                    elif s <= t:
                        result[i][t] += weight * v
    for i, rollout in enumerate(batch.rollouts):
        peers = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and math.isfinite(r)]
        if outcome and math.isfinite(rewards[i]):
            dev = deviation(peers)
            own = (rewards[i] - mean(peers)) / (dev + 1e-4 if dev else 1.0)
            result[i] = [v + own if on else 0.0 for v, on in zip(result[i], rollout.sampled, strict=True)]
    return [
        [v for v, on in zip(values, r.sampled, strict=True) if on]
        for values, r in zip(result, batch.rollouts, strict=True)
    ]


def random_streams(seed):
    rng = np.random.default_rng(seed)
    batch = batch_of(
        [math.nan if rng.random() < 0.1 else round(float(rng.random()), 2) for _ in range(12)],
        rng.integers(0, 3, 12).tolist(),
        rng.integers(1, 9, 12).tolist(),
    )
    for name in ("p", "q"):
        scored = []
        for rollout in batch.rollouts:
            size = int(rollout.sampled.sum())
            cuts = sorted(set(rng.integers(1, size + 1, 3).tolist()))
            scores = [math.nan if rng.random() < 0.2 else round(float(rng.normal()), 2) for _ in cuts]
            # With gaps: a span may begin after the end of the one before.
            begins = [min(b - 1, a + int(rng.integers(0, 2))) for a, b in zip([0, *cuts], cuts, strict=False)]
            scored.append(list(zip(begins, cuts, scores, strict=True)) if rng.random() < 0.8 else [])
        with_stream(batch, name, scored, weight=0.5 if name == "q" else 1.0)
    return batch


@pytest.mark.parametrize("seed", range(6))
def test_two_streams_by_hand(seed):
    """Each with its own weight, discount, credit and normalisation, beside the outcome."""
    batch = random_streams(seed)
    written = {
        "p": {"weight": 2.0, "discount": 0.9, "normalise": "std"},
        "q": {"credit": "own", "normalise": "leave_one_out", "among": "place", "weight": -1.5},
    }
    advantage = registry.build("advantage", {"name": "spans", "terms": written})
    streams = [("p", 2.0, "to_go", 0.9, "std", "group"), ("q", 0.5 * -1.5, "own", 1.0, "leave_one_out", "place")]
    got = advantage(batch)
    assert_sound(batch, got)
    for mine, theirs in zip(spread(batch, got), hand_written(batch, streams, outcome=True), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_order_and_other_groups_change_nothing(seed):
    batch = random_streams(seed)
    estimate = SpanAdvantage(terms={"p": 1.0, "q": 0.3}, discount=0.7)
    assert_ordered(estimate, batch, np.random.default_rng(seed).permutation(len(batch)))
    more = batch_of([5.0, -2.0, math.nan], [8, 8, 9])
    for name in ("p", "q"):
        with_stream(more, name, [[(0, 2, 100.0)], [], [(1, 3, -7.0)]])
    assert_alone(estimate, batch, more)


def test_the_sum_of_deltas_telescopes():
    """From any step on, the sum of the differences is the score of that step."""
    rng = np.random.default_rng(3)
    scores = rng.random(7).tolist()
    batch = with_stream(batch_of([1.0], lengths=[7]), "p", [[(k, k + 1, s) for k, s in enumerate(scores)]])
    np.testing.assert_allclose(spread(batch, alone(transform=("delta",))(batch))[0], scores, rtol=1e-12)


def test_undecided_spans_are_masked():
    """Their tokens learn nothing from the stream, the others what they would without them."""
    nan = math.nan
    lengths = [6, 6]
    with_nan = with_stream(
        batch_of([1.0, 0.0], lengths=lengths), "p", [[(0, 2, 2.0), (2, 4, nan), (4, 6, 0.0)], [(0, 3, 0.5)]]
    )
    without = with_stream(batch_of([1.0, 0.0], lengths=lengths), "p", [[(0, 2, 2.0), (4, 6, 0.0)], [(0, 3, 0.5)]])
    for options in ({}, {"credit": "own"}, {"credit": "block"}, {"per": "token", "discount": 1.0}):
        one, other = (spread(b, alone(normalise="std", **options)(b)) for b in (with_nan, without))
        assert one[0][2:4] == [0.0, 0.0]
        assert one[0][:2] == other[0][:2] and one[0][4:] == other[0][4:] and one[1] == other[1]
        assert any(one[0])
    # The response's own advantage stays where the stream is masked.
    apart = SpanAdvantage(terms={"p": 1.0})
    assert spread(with_nan, apart(with_nan))[0][2] == GroupAdvantage()(with_nan)[0]


@given(case=cases)
@settings(max_examples=20, deadline=None)
def test_responses_without_spans_have_the_outcome_alone(case):
    batch = of_case(case)
    for rollout in batch.rollouts:
        rollout.spans = {}
    want = spread(batch, GroupAdvantage()(batch))
    for a, b in zip(spread(batch, SpanAdvantage(terms={"p": 1.0})(batch)), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    assert not any(any(values) for values in spread(batch, alone()(batch)))
    # With outcome last the response is one step, as without a span of the verdict.
    last = SpanAdvantage(terms={"p": 1.0}, outcome="last")
    for a, b in zip(spread(batch, last(batch)), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_turns_are_blocks_and_steps():
    """Two turns with a tool's token between them: spans are summed before (kind) or after (block) they are
    normalised."""
    batch = with_stream(
        batch_of([1.0, 1.0], lengths=[5, 5]), "p", [[(0, 1, 1.0), (1, 2, 3.0), (3, 5, 5.0)], [(0, 2, 1.0)]]
    )
    for rollout in batch.rollouts:
        rollout.origin[PROMPT + 2] = Origin.TOOL
        rollout.segments = [Segment("turn", PROMPT, PROMPT + 2), Segment("turn", PROMPT + 3, PROMPT + 5)]
    got = spread(batch, alone(kind="turn", credit="own")(batch))
    assert got == [[4, 4, 5, 5], [1, 1, 0, 0]]
    # Mean of 1, 3, 5, 1 is 2.5.
    got = spread(batch, alone(kind="turn", credit="block", normalise="mean")(batch))
    assert got == [[-1, -1, 2.5, 2.5], [-1.5, -1.5, 0, 0]]
    numbers = SpanRewards.of_turns(batch, [[1.0, 2.0, 9.0], [3.0]])
    assert [(s.start.tolist(), s.end.tolist(), s.score.tolist()) for s in numbers.spans] == [
        ([PROMPT, PROMPT + 3], [PROMPT + 2, PROMPT + 5], [1.0, 2.0]),
        ([PROMPT], [PROMPT + 2], [3.0]),
    ]


def test_a_number_for_each_token_is_a_discounted_return():
    """G_t = x_t + 0.9 G_(t+1) over what the policy wrote, whatever stands between."""
    batch = batch_of([1.0], lengths=[5])
    batch.rollouts[0].origin[PROMPT + 2] = Origin.TOOL
    values = np.arange(float(len(batch.rollouts[0])))
    batch.rollouts[0].spans["p"] = SpanRewards.of_tokens(batch, [values]).spans[0]
    following, want = 0.0, []
    for x in (6.0, 5.0, 3.0, 2.0):
        following = x + 0.9 * following
        want.insert(0, following)
    for per in ("token", "step"):
        np.testing.assert_allclose(spread(batch, alone(per=per, discount=0.9)(batch))[0], want, rtol=1e-12)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"terms": {}}, "terms is empty"),
        ({"terms": {"a": 1, "b": 1}, "outcome": "last"}, "one stream"),
        ({"terms": {"a": {"wieght": 2}}}, "wieght"),
        ({"terms": {"a": {"discount": 2}}}, "from 0 to 1"),
        ({"terms": {"a": {"credit": "all"}}}, "credit"),
    ],
)
def test_what_is_refused(written, message):
    with pytest.raises(ConfigError, match=message):
        registry.build("advantage", {"name": "spans", **written})


def test_a_term_that_is_not_there_is_named():
    config = Config.model_validate({"rewards": [{"name": "verdict_spans", "as": "steps"}]})
    SpanAdvantage(terms={"steps": 1.0}).check(config, [])
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        SpanAdvantage(terms={"stepss": 1.0}).check(config, [])
    assert SpanAdvantage().reads_characters and not SpanAdvantage(terms={"p": 1.0}).reads_characters
    assert (SpanAdvantage(terms={"p": 1.0}).smallest_group, alone().smallest_group) == (2, 1)
