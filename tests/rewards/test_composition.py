"""Terms made of terms, and what a term may be written with, against tables worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reward_helpers import make_batch
from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.core.schedules import ComponentList
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.rewards import at_step, build_terms, check, components_of, score


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def given(values, scores=None, groups=None):
    """A batch whose verdicts' part `x` has these values (NaN: undecided); its plain score is `scores`."""
    batch = make_batch([0.0] * len(values), groups=groups)
    for i, (rollout, value) in enumerate(zip(batch.rollouts, values, strict=True)):
        total = 0.0 if scores is None else scores[i]
        rollout.verdicts["v"] = (
            Verdict.undecided("down")
            if total is None
            else Verdict(VerdictStatus.PARTIAL, total, scores={} if value is None else {"x": value})
        )
    return batch


X = {"name": "verdict", "part": "x", "as": "x"}


def test_the_truth_table_of_a_gate(column, nan):
    batch = given([1.0, 0.5, None, 0.0], [0.7, 0.7, 0.7, None])
    assert np.isnan(column(batch, X)[2:]).all()
    close(column(batch, {"name": "gate", "by": X}), [0.7, 0, nan, nan])
    close(column(batch, {"name": "gate", "by": X, "at_least": 0.5, "otherwise": -1}), [0.7, 0.7, nan, nan])
    close(column(batch, {"name": "gate", "by": X, "below": True}), [0, 0.7, nan, nan])
    other = {"name": "gate", "term": X, "by": "verdict", "at_least": 0.5}
    close(column(batch, other), [1, 0.5, nan, nan])


def test_an_undecided_term_behind_a_closed_gate_does_not_matter(column, nan):
    batch = given([None, 0.5], [0.0, 1.0])
    close(column(batch, {"name": "gate", "term": X, "by": "verdict", "otherwise": 3}), [3, 0.5])


def test_a_veto_strikes_first(column, nan):
    batch = given([0.5, 1.0, None, 1.0], [0.7, 0.7, 0.2, None])
    close(column(batch, {"name": "veto", "vetoes": [X]}), [-1, 0.7, nan, nan])
    both = {"name": "veto", "vetoes": [X, "verdict"], "below": 0.6, "value": -2}
    close(column(batch, both), [-2, 0.7, -2, nan])  # the third: undecided x, and a verdict that strikes


def test_products_and_sums(column, nan):
    batch = given([0.5, 0.0, None, 0.25], [0.5, 0.5, 0.0, 1.0])
    close(column(batch, {"name": "product", "terms": ["verdict", X]}), [0.25, 0, 0, 0.25])
    weighted = {"name": "sum", "terms": ["verdict", {**X, "weight": 2}]}
    close(column(batch, weighted), [1.5, 0.5, nan, 1.5])
    close(column(batch, {**weighted, "weight": 0.5}), [0.75, 0.25, nan, 0.75])
    close(column(batch, {"name": "product", "terms": ["verdict"]}), [0.5, 0.5, 0, 1])


def test_tiers_are_lexicographic(column, nan):
    batch = given([1.0, 1.0, 0.5, 0.9, None], [0.2, 1.0, 1.0, 0.0, 1.0])
    close(column(batch, {"name": "tiers", "terms": [X, "verdict"]}), [0.6, 1, 0.25, 0.45, nan])
    close(column(batch, {"name": "tiers", "terms": ["verdict", X]}), [0.1, 1, 0.75, 0, nan])
    close(column(batch, {"name": "tiers", "terms": ["verdict"]}), [0.2, 1, 1, 0, 1])


def test_a_table_of_right_and_of_a_condition(column, nan):
    spec = {"name": "by_condition", "condition": X, "right": [1, 2], "wrong": [0, -1]}
    batch = given([0.0, 1.0, 0.0, 1.0, None], [1.0, 1.0, 0.0, 0.0, 1.0])
    close(column(batch, spec), [1, 2, 0, -1, nan])
    close(column(batch, {**spec, "balance": 1.0}), [1, 2, 0, -1, nan])  # half and half: nothing is taken
    much = given([1.0, 1.0, 1.0, 0.0], [1.0] * 4)
    close(column(much, {**spec, "balance": 1.0}), [1.5, 1.5, 1.5, 1])
    little = given([1.0, 0.0, 0.0, 0.0], [1.0] * 4)
    close(column(little, {**spec, "balance": 1.0}), [2, 0.5, 0.5, 0.5])


def test_bounded_and_centred(column, nan):
    batch = given([2.0, 0.0, -3.0, None], [1.0] * 4)

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    close(column(batch, {"name": "bounded", "term": X}), [sigmoid(2), 0.5, sigmoid(-3), nan])
    close(column(batch, {"name": "bounded", "term": X, "squash": "none"}), [2, 0, -3, nan])
    close(column(batch, {"name": "bounded", "term": X, "squash": "clip", "high": 1.5}), [1.5, 0, -1, nan])
    tanh = {"name": "bounded", "term": X, "squash": "tanh", "scale": 2, "centre": 1}
    close(column(batch, tanh), [2 * math.tanh(0.5), 2 * math.tanh(-0.5), 2 * math.tanh(-2), nan])
    peers = {"name": "bounded", "term": X, "centre": "peers"}
    expected = [(sigmoid(2) + sigmoid(5)) / 2, (sigmoid(-2) + sigmoid(3)) / 2, (sigmoid(-5) + sigmoid(-3)) / 2, nan]
    close(column(batch, peers), expected)
    close(column(given([7.0], [1.0]), peers), [0.5])
    assert np.isfinite(column(given([1e6, -1e6], [1.0] * 2), peers)).all()


def test_named_scores_of_a_verdict(column, nan):
    batch = given([0.25, None, 0.5], [1.0, 1.0, None])
    close(column(batch, X), [0.25, nan, nan])
    close(column(batch, {**X, "missing": 0}), [0.25, 0, nan])
    with pytest.raises(ConfigError, match=r"no verdict has a score named 'xx'; did you mean 'x'"):
        column(batch, {"name": "verdict", "part": "xx"})
    batch.rollouts[0].verdicts["w"] = Verdict.from_score(0.125)
    close(column(batch, {"name": "verdict", "verifier": "w"}), [0.125, nan, nan])


def test_controls(column):
    batch = make_batch([1.0] * 400, groups=[f"g{i // 8}" for i in range(400)])
    close(column(batch, {"name": "constant", "value": 3}), np.full(400, 3.0))
    drawn = column(batch, "random")
    assert set(drawn) == {0.0, 1.0}
    assert 0.4 < drawn.mean() < 0.6
    np.testing.assert_array_equal(drawn, column(batch, "random"))
    assert (drawn != column(batch, {"name": "random", "seed": 1})).any()
    assert column(batch, {"name": "random", "share": 0.1}).mean() < 0.2
    assert column(batch, {"name": "random", "share": 0}).sum() == 0


def test_a_column_for_every_term_and_those_inside(column):
    batch = given([1.0, 0.0], [0.7, 0.7])
    column(batch, {"name": "gate", "by": X, "as": "gated"}, {"name": "verdict", "weight": 2})
    assert {"reward/gated", "reward/x", "reward/verdict"} <= set(batch.columns)
    close(batch.column("reward/gated"), [0.7, 0])
    close(batch.column("reward"), [2.1, 1.4])


def test_terms_of_some_sources_only(column, nan):
    tasks = {s: Task(id=s, prompt="?", source=s) for s in ("math", "code")}
    batch = make_batch([1.0, 0.0, None], groups=["math", "code", "code"], lengths=[2, 3, 4], tasks=tasks)
    short = {"name": "length", "per": 1, "weight": -0.1, "sources": ["math"]}
    close(column(batch, "verdict", short), [0.8, 0, nan])
    close(batch.column("reward/length"), [2, nan, nan])
    close(column(batch, {"name": "verdict", "sources": "math"}, {**short, "sources": ["code"]}), [1, -0.3, -0.4])
    with pytest.raises(ConfigError, match=r"no task is of the source 'maths'.*did you mean 'math'"):
        column(batch, "verdict", {**short, "sources": "maths"})
    with pytest.raises(ConfigError, match="tasks of the source 'code' have no term"):
        column(batch, {"name": "verdict", "sources": "math"})
    with pytest.raises(ConfigError, match="stands inside another term"):
        column(batch, {"name": "gate", "by": {"name": "format", "sources": ["math"]}})


def test_a_group_statistic_of_a_source_is_of_its_own_rollouts(column):
    tasks = {s: Task(id=s, prompt="?", source=s) for s in ("math", "code")}
    batch = make_batch([1.0, 1.0, 1.0], groups=["code", "math", "math"], lengths=[50, 2, 4], tasks=tasks)
    spec = {"name": "brevity", "form": "range", "alpha": 1, "sources": ["math"]}
    close(column(batch, spec, {"name": "constant", "value": 0}), [0, 2, 1])


def test_weights_and_options_move(nan):
    specs = [
        {"name": "verdict", "weight": {"schedule": "linear", "start": 1.0, "end": 0.0}},
        {
            "name": "gate",
            "term": {"name": "constant", "weight": {"metric": "reward/verdict", "target": 0.5, "initial": 2.0}},
            "by": "verdict",
            "otherwise": {"at": {0: 0.0, 5: 4.0}},
        },
    ]
    terms = build_terms(specs)
    batch = make_batch([1.0, 0.0])
    close(score(batch, at_step(terms, 0, 10)).column("reward"), [3, 0])
    close(score(batch, at_step(terms, 5, 10)).column("reward"), [2.5, 4])
    moving = ComponentList(components_of(terms))
    assert moving.scheduled(5, 10) == {
        "schedule/reward/verdict.weight": 0.5,
        "schedule/reward/gate.otherwise": 4.0,
        "schedule/reward/constant.weight": 2.0,
    }
    (controller,) = moving.controllers()
    controller.observe({"reward/verdict": 0.6})
    close(score(batch, at_step(terms, 5, 10)).column("reward"), [0.5 + 2.04, 4])


def test_the_same_term_may_stand_in_several_places_and_two_of_one_name_may_not():
    build_terms(["verdict", {"name": "gate", "by": {"name": "verdict"}}, {"name": "tiers", "terms": ["verdict"]}])
    with pytest.raises(ConfigError, match=r"two different terms are called 'verdict'.*`as`"):
        build_terms(["verdict", {"name": "gate", "by": {"name": "verdict", "part": "x"}}])
    with pytest.raises(ConfigError, match=r"'length' stands there twice.*`as`"):
        build_terms(["length", {"name": "length", "per": 3}])
    assert [t.name for t in build_terms(["length", {"name": "length", "per": 3, "as": "thirds"}])] == [
        "length",
        "thirds",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "gate", "by": "fromat"}, r"there is no reward 'fromat'; did you mean 'format'"),
        ({"name": "gate", "by": {"name": "length", "pre": 3}}, r"no option 'pre'"),
        ({"name": "sum", "terms": []}, r"at least one term"),
        ({"name": "sum", "terms": ["verdict", {"name": "veto", "vetos": []}]}, r"did you mean 'vetoes'"),
        ({"name": "verdict", "weight": "heavy"}, r"the weight of 'verdict' is 'heavy'"),
        ({"name": "verdict", "weight": True}, r"the weight of 'verdict' is True"),
        ({"name": "verdict", "sources": []}, r"the sources of 'verdict'"),
        ({"name": "bounded", "scale": 0}, r"scale must be above 0"),
    ],
    ids=str,
)
def test_a_wrong_term_is_refused_by_name(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_terms([spec])


def test_a_wrong_term_inside_another_is_found_when_the_config_is_read():
    with pytest.raises(ConfigError, match=r"rewards.*there is no reward 'fromat'"):
        load_config({"rewards": ["verdict", {"name": "gate", "by": "fromat"}]})


def test_a_term_that_needs_the_policy_does_not_go_with_dynamic_sampling():
    config = Config.model_validate({"rollout": {"dynamic_sampling": {"attempts": 2}}})
    with pytest.raises(ConfigError, match=r"'entropy' needs a forward pass.*rollout.dynamic_sampling to null"):
        check(build_terms([{"name": "gate", "by": "entropy"}]), config)


def test_a_verdict_by_name_and_what_its_absence_is_worth():
    """Undecided stays undecided; a rollout without that verdict is undecided, or worth `missing`."""
    batch = make_batch([1.0, 0.5, None])
    batch.rollouts[0].verdicts["turn 2"] = Verdict.from_score(0.25)
    batch.rollouts[2].verdicts["turn 2"] = Verdict.undecided("down")
    for options, want in (
        ({}, [1.0, 0.5, np.nan]),
        ({"missing": 9.0}, [1.0, 0.5, np.nan]),
        ({"verifier": "turn 2"}, [0.25, np.nan, np.nan]),
        ({"verifier": "turn 2", "missing": 0.0}, [0.25, 0.0, np.nan]),
    ):
        [term] = build_terms([{"name": "verdict", **options}])
        np.testing.assert_array_equal(term.function(batch), want)
