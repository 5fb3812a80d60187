"""pairs: both orders, opponents, the solver against another one, and what stays undecided."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from rlvr.errors import ConfigError, DataError
from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.verifiers import VerifierPool, as_verifier
from rlvr.verifiers.judge.pairwise_verifier import PRIOR, bradley_terry
from rlvr.verifiers.pool import Verification

TASK = Task("1", "Write much.", "bbb", info={"old": "bb"})


def longer(request):
    first, second = (len(request.fenced[name]) for name in ("first", "second"))
    return request.verdict("A" if first > second else "B" if second > first else "tie")


def pairs(stub, **options):
    return as_verifier({"name": "pairs", "urls": stub.url, "model": "m", "hedge": None, "retries": 0, **options})


def verdicts(stub, texts, **options):
    return asyncio.run(pairs(stub, **options).verify_group(TASK, texts))


def scores(stub, texts, **options):
    return [verdict.score for verdict in verdicts(stub, texts, **options)]


def test_each_is_compared_with_each_in_both_orders():
    with StubJudge(longer) as stub:
        assert scores(stub, ["a", "bbb", "cc", "dd"]) == pytest.approx([0, 1, 0.5, 0.5])
        asked = [(r.fenced["first"], r.fenced["second"]) for r in stub.requests]
    assert len(asked) == 12 and set(asked) == {
        (a, b) for a in ("a", "bbb", "cc", "dd") for b in ("a", "bbb", "cc", "dd") if a != b
    }


def test_a_judge_that_always_prefers_a_place_makes_ties():
    with StubJudge(lambda request: request.verdict("A")) as stub:
        given = verdicts(stub, ["a", "bbb", "cc"])
    assert [one.score for one in given] == [0.5] * 3
    assert all(one.scores["consistent"] == 0 for one in given)


def test_swapping_the_members_swaps_the_scores():
    with StubJudge(longer) as stub:
        texts = ["a", "bbb", "cc", "dddd", "a"]
        by_text = dict(zip(texts, scores(stub, texts), strict=True))
        assert scores(stub, texts[::-1]) == [by_text[text] for text in texts[::-1]]


def test_equal_responses_are_ties_that_nobody_is_asked_for():
    with StubJudge(longer) as stub:
        assert scores(stub, ["a", "a", "bb"]) == pytest.approx([0.25, 0.25, 1.0])
        assert len(stub.requests) == 2
        assert scores(stub, ["a", "a"]) == [0.5, 0.5] and len(stub.requests) == 2


def test_an_anchor_and_a_random_member():
    with StubJudge(longer) as stub:
        assert scores(stub, ["a", "cccc", "ddd", "bbb"], against="anchor") == [0, 1, 0.5, 0.5]
        assert len(stub.requests) == 6
        assert scores(stub, ["a", "cccc", "dd"], against="anchor", anchor="old") == [0, 1, 0.5]
        assert scores(stub, ["dddd"], against="anchor") == [1]
        before = len(stub.requests)
        texts = ["a", "bb", "ccc", "dddd"]
        given = scores(stub, texts, against="random")
        assert len(stub.requests) - before == 6
        assert given.count(0.5) == 1
        drawn = given.index(0.5)
        assert given == [0.0] * drawn + [0.5] + [1.0] * (3 - drawn)
        assert scores(stub, texts, against="random") == given


STRENGTHS = {"-3": 1.0, "-2": 5 / 6, "-1": 4 / 6, "1": 2 / 6, "2": 1 / 6, "3": 0.0}
"""How much better the second one is -> the share of the win of the first."""


def by_how_much(request):
    """-3 to 3 in favour of the second text, by the difference in length; of equal ones the first."""
    first, second = (len(request.fenced[name]) for name in ("first", "second"))
    return request.verdict(str(max(-3, min(3, second - first)) or -1))


def test_a_scale_of_preference_is_the_mean_strength():
    """The mean of (strength + 3) / 6 over both orders and the others: of 4 letters against 1 and 3 it is
    ((3 + 3) / 6 + (1 + 3) / 6) / 2."""
    with StubJudge(by_how_much) as stub:
        given = verdicts(stub, ["a", "bbb", "cccc"], labels=STRENGTHS)
    assert [one.score for one in given] == pytest.approx([(1 + 0) / 12, (5 + 2) / 12, (6 + 4) / 12])
    assert all(one.scores["consistent"] == 1 for one in given)
    with StubJudge(by_how_much) as stub:
        given = verdicts(stub, ["aa", "bb", "ccc"], labels=STRENGTHS)
    # The first of two equal ones is always preferred a little: 1/6 each way, half of the win.
    assert given[0].score == given[1].score == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert [one.scores["consistent"] for one in given] == [0.5, 0.5, 1.0]


def with_probability(request):
    """A token A with probability 0.9 where the first text is longer, else 0.2, and B with half of the rest."""
    first, second = (len(request.fenced[name]) for name in ("first", "second"))
    a = 0.9 if first > second else 0.2
    return request.probabilities({"A": a, "B": (1 - a) / 2, "neither": (1 - a) / 2})


def test_the_probability_of_a_label_is_read_in_both_orders():
    """0.9 of 0.95 as the first, and one less 0.2 of 0.6 as the second."""
    labels = {"A": 1.0, "B": 0.0}
    with StubJudge(with_probability) as stub:
        given = verdicts(stub, ["a", "cccc"], labels=labels, read="probability", against="anchor", anchor="old")
        assert all(request.body["max_tokens"] == 1 for request in stub.requests)
    beats = (0.9 / 0.95 + 1 - 0.2 / 0.6) / 2
    assert [one.score for one in given] == pytest.approx([1 - beats, beats])
    assert all(one.scores["consistent"] == 1 for one in given)


def test_one_response_alone_has_nobody_to_beat():
    with StubJudge(longer) as stub:
        verifier = pairs(stub)
        alone = asyncio.run(verifier.verify(TASK, "a"))
        assert alone.score is None and "no other response" in alone.reason
        assert verifier.metrics()["undecided"] == 0


def test_a_pair_without_both_orders_is_left_out():
    def silent_on(text):
        return lambda request: "hm" if request.fenced["first"] == text else longer(request)

    with StubJudge(silent_on("a")) as stub:
        given = verdicts(stub, ["a", "bbb", "cc", "dddd"])
    # Of `a` no pair is left; of the others two of three.
    assert [one.score for one in given] == [None, 0.5, 0.0, 1.0]
    assert given[0].reason.startswith("unparsable")


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 10**6))
def test_strengths_are_the_most_likely_ones(size, seed):
    """Against a general optimizer of the log-likelihood with the added ties, on incomplete tables, too."""
    random = np.random.default_rng(seed)
    won = random.choice([0.0, 0.25, 0.5, 0.75, 1.0], (size, size))
    won = np.where(np.tri(size, k=-1, dtype=bool), won, 1 - won.T)
    missing = np.triu(random.random((size, size)) < 0.2, 1)
    won[missing | missing.T] = np.nan

    def loss(log_strengths):
        total = 0.0
        for i in range(size):
            for j in range(size):
                if i != j and np.isfinite(won[i, j]):
                    total += (won[i, j] + PRIOR / 2) * np.logaddexp(0, log_strengths[j] - log_strengths[i])
        return total + 1e-9 * (log_strengths**2).sum()

    best = minimize(loss, np.zeros(size), method="BFGS", options={"gtol": 1e-9})
    ours = np.log(bradley_terry(won))
    assert loss(ours) <= best.fun + 1e-6
    assert ours.mean() == pytest.approx(0, abs=1e-9)


def test_two_members_by_hand():
    won = np.asarray([[0.5, 1.0], [0.0, 0.5]])
    strengths = bradley_terry(won)
    assert strengths[0] / strengths[1] == pytest.approx((1 + PRIOR / 2) / (PRIOR / 2))


def test_bradley_terry_orders_a_group():
    with StubJudge(longer) as stub:
        given = scores(stub, ["a", "bbb", "cc"], score="bradley_terry")
    assert given[0] < 0.2 < given[2] < 0.8 < given[1] < 1
    assert given[2] == pytest.approx(0.5)


def test_what_is_refused_before_training():
    good = {"name": "pairs", "urls": "http://127.0.0.1:1/v1", "model": "m"}
    with VerifierPool() as pool, pytest.raises(DataError, match="no 'answer' to compare with"):
        Verification({**good, "against": "anchor"}, pool).check([Task("1", "?")])
    with pytest.raises(ConfigError, match="against=all"):
        as_verifier({**good, "against": "anchor", "score": "bradley_terry"})
    with pytest.raises(ConfigError, match="from 0 to 1"):
        as_verifier({**good, "labels": {"A": 1, "B": -1}})
    with pytest.raises(ConfigError, match="set votes to 1"):
        as_verifier({**good, "read": "probability", "votes": 3})
    with pytest.raises(ConfigError, match=r"no \{second\}"):
        as_verifier({**good, "template": "{first}"})


def test_a_rule_and_pairs_in_one_run(make_trainer):
    """By name beside a rule, and behind it as a gate."""
    with StubJudge(longer) as stub:
        written = {"name": "pairs", "urls": stub.url, "model": "m", "hedge": None}
        rewards = ["verdict", {"name": "verdict", "verifier": "better", "as": "better"}]
        over = {"verifier": {"name": "regex", "pattern": ".*[02468].*"}, "verifiers": {"better": written}}
        trainer = make_trainer({**over, "rewards": rewards})
        (row,) = trainer.train(1)
        assert row["verifier/better/undecided"] == 0
        for group in trainer.batch.groups():
            lengths = np.asarray([len(rollout.text) for rollout in group.rollouts])
            shares = [((one > lengths).sum() + ((one == lengths).sum() - 1) / 2) / 3 for one in lengths]
            np.testing.assert_allclose(trainer.batch.columns["reward/better"][group.index], shares)
        gate = {"name": "regex", "pattern": ".*[02468].*"}
        gated = {"name": "combine", "how": "gated", "parts": {"rule": gate, "better": written}}
        trainer = make_trainer({"verifier": gated}, "gated")
        trainer.train(1)
        for rollout in trainer.batch.rollouts:
            if not any(c in "02468" for c in rollout.text):
                assert rollout.verdict.score == 0
