"""Terms that look at lengths, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reward_helpers import make_batch
from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.rewards import RewardContext, bind, build_terms, check, score

TEN = {"rollout": {"max_new_tokens": 10}}


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_the_soft_overlong_penalty_is_daposs_line(shaped):
    """Eq. 13 with L_max 10 and L_cache 4: 0 to 6, then a quarter less with every token."""
    spec = {"name": "soft_overlong", "cache": 4}
    close(shaped(spec, [1.0] * 7, [0, 5, 6, 7, 9, 10, 15], config=TEN), [0, 0, 0, -0.25, -0.75, -1, -1])
    close(shaped("soft_overlong", [1.0] * 3, [8, 9, 10], config=TEN), [0, -0.5, -1])  # a fifth of 10
    close(shaped({"name": "soft_overlong", "max_length": 4, "cache": 4}, [None, 0.0], [1, 4]), [-0.25, -1])


def test_a_cache_longer_than_the_response_is_refused():
    with pytest.raises(ConfigError, match="cache 11, and it must be 1 to max_length, 10"):
        check(build_terms([{"name": "soft_overlong", "cache": 11}]), load_config(TEN))


def test_brevity_among_the_right_answers(shaped, nan):
    scores, lengths = [1.0, 1.0, 0.0, None, 1.0], [2, 4, 1, 1, 6]  # the right ones: mean 4, std sqrt(8/3)
    z = 2 / math.sqrt(8 / 3)
    expected = [1 - 0.5 / (1 + math.exp(z)), 0.75, 0, nan, 1 - 0.5 / (1 + math.exp(-z))]
    close(shaped({"name": "brevity", "alpha": 0.5}, scores, lengths), expected)
    close(shaped({"name": "brevity", "form": "range", "alpha": 0.5}, scores, lengths), [1.5, 1.25, 0, nan, 1])
    kimi = shaped({"name": "brevity", "form": "kimi", "alpha": 2}, [*scores, 0.0], [*lengths, 6])
    close(kimi, [0.6, -0.2, 0, nan, -1, -1])  # all decided: 1 to 6; the wrong one of length 1 is worth min(0, 0.5)


@pytest.mark.parametrize("form", ["sigmoid", "range", "kimi"])
def test_brevity_without_strength_or_spread(shaped, form):
    none = shaped({"name": "brevity", "form": form, "alpha": 0}, [1.0, 1.0, 0.0], [1, 9, 5])
    close(none, [0, 0, 0] if form == "kimi" else [1, 1, 0])
    for lengths in ([4], [4, 4], [0, 0]):
        got = shaped({"name": "brevity", "form": form}, [1.0] * len(lengths), lengths)
        assert len(set(got)) == 1 and np.isfinite(got).all()
    assert np.isnan(shaped({"name": "brevity", "form": form}, [None, None], [1, 2])).all()


def test_brevity_of_hundreds_is_that_of_each_group(column):
    rng = np.random.default_rng(0)
    lengths, scores = rng.integers(0, 40, 600), rng.integers(0, 2, 600).astype(float)
    groups = [f"g{i % 3}" for i in range(600)]
    whole = column(make_batch(scores, lengths, groups), "brevity")
    for g in range(3):
        part = [i for i in range(600) if i % 3 == g]
        close(whole[part], column(make_batch(scores[part], lengths[part]), "brevity"))


def test_length_targets(shaped, nan):
    scores, lengths = [1.0, 1.0, 0.0, None], [3, 5, 2, 1]
    close(shaped({"name": "length_target", "target": 4}, scores, lengths), [0.5, 0, 0, nan])
    exact = {"name": "length_target", "form": "exact", "target": 4, "alpha": 0.1}
    close(shaped(exact, scores, lengths), [-0.1, -0.1, -0.2, nan])
    most = {"name": "length_target", "form": "at_most", "target": 4, "alpha": 0.2}
    close(shaped(most, scores, lengths), [0.7, 0.3, 0, nan])
    close(shaped(most, [1.0, 1.0], [0, 40]), [1, 0])  # clipped: 1.3 and -6.7


def test_a_relative_target_is_of_the_groups_right_answers(shaped):
    spec = {"name": "length_target", "target": 0.75, "relative": "right"}
    close(shaped(spec, [1.0, 1.0, 0.0], [2, 6, 100]), [0.5, 0, 0])  # 0.75 x 4
    close(shaped({**spec, "relative": "all"}, [1.0, 1.0, 0.0, None], [2, 6, 10, 99]), [0.5, 0, 0, np.nan])  # 0.75 x 6
    nothing_right = {"name": "length_target", "form": "exact", "target": 1.0, "alpha": 1, "relative": "right"}
    close(shaped(nothing_right, [0.0, 0.0], [2, 4]), [-1, -1])  # of all members, where none is right


def test_a_target_of_the_task_itself(column):
    tasks = {g: Task(id=g, prompt="?", info={"budget": b}) for g, b in (("a", 2), ("b", 5))}
    batch = make_batch([1.0] * 4, [2, 3, 5, 6], ["a", "a", "b", "b"], tasks=tasks)
    spec = {"name": "length_target", "target": "budget"}
    close(column(batch, spec), [0.5, 0, 0.5, 0])
    tasks["b"] = Task(id="b", prompt="?", info={"budget": "long"})
    with pytest.raises(ConfigError, match=r"info\.budget, and task 'b' has 'long'"):
        column(make_batch([1.0, 1.0], groups=["a", "b"], tasks=tasks), spec)


def test_an_adaptive_target_follows_what_each_class_of_difficulty_needs():
    """Two classes, hard below a pass rate of 0.5. The target is the shortest length with one right answer per group."""
    (term,) = bind(
        build_terms([{"name": "adaptive_length_target", "buckets": 2}]), RewardContext(Config.model_validate(TEN), [])
    )
    piece = term.function
    easy, hard = make_batch([1.0, 1.0, 0.0], [4, 8, 2]), make_batch([1.0, 0.0, 0.0], [9, 1, 12])
    close(score(easy, [term]).column("reward"), [0.5, 0.5, 0])  # nothing seen: 10 tokens
    assert piece.targets() == [10, 10]
    piece.observe({})
    assert piece.targets() == [10, 4]
    close(score(easy, [term]).column("reward"), [0.5, 0, 0])
    score(make_batch([1.0, 1.0], [6, 7]), [term])
    piece.observe({})
    piece.observe({})  # counts once
    assert piece.targets() == [10, 6]  # two groups, right at 4, 6, 7, 8: two answers within 6
    score(hard, [term])
    piece.observe({})
    assert piece.targets() == [9, 6]
    again = build_terms([{"name": "adaptive_length_target", "buckets": 2}])[0].function
    again.load_state_dict(piece.state_dict())
    assert again.targets()[1] == 6
    explore = {"name": "adaptive_length_target", "buckets": 1, "explore": True, "alpha": 1}
    (term,) = bind(build_terms([explore]), RewardContext(Config.model_validate(TEN), []))
    close(score(make_batch([1.0, 0.0, 0.0, None], [3, 3, 11, 3]), [term]).column("reward"), [1, 0, 1, np.nan])


def test_repetitions(column):
    batch = make_batch([1.0] * 4, texts=["a b a b a b", "a b c d", "", "A b a B"])
    share = {"name": "repetition", "n": 2, "of": "words"}
    close(column(batch, share), [-3 / 5, 0, 0, -1 / 3])  # ab ba ab ba ab; Ab ba aB in lower case: ab ba ab
    close(column(batch, {**share, "count": True, "weight": 0.05}), [-0.15, 0, 0, -0.05])
    tokens = make_batch([1.0] * 3, [14, 7, 0])  # ids 0 to 6 again and again
    close(column(tokens, {"name": "repetition", "n": 3}), [-5 / 12, 0, 0])
    with pytest.raises(ConfigError, match="at least 1"):
        column(batch, {"name": "repetition", "n": 0})


def test_a_limit_of_repetitions(column):
    """-1 where one pair of words stands three times, however long the response is."""
    batch = make_batch([1.0] * 4, texts=["a b c a b c a b", "a b c a b c", "a a a a", "a b c d e f g h"])
    often = {"name": "repetition", "n": 2, "of": "words", "limit": 3}
    close(column(batch, often), [-1, 0, -1, 0])
    with pytest.raises(ConfigError, match="one of the two"):
        column(batch, {**often, "count": True})
    with pytest.raises(ConfigError, match="at least 2"):
        column(batch, {**often, "limit": 1})


def test_the_gate_of_the_pass_rate(column, nan):
    """Three groups with rates 1, 0.5 and 0; one all undecided."""
    scores = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None, None]
    groups = ["a", "a", "b", "b", "c", "c", "d", "d"]

    def reward(**options):
        spec = {"name": "by_pass_rate", "then": {"name": "constant", "value": 9}, **options}
        return column(make_batch(scores, groups=groups), spec)

    close(reward(), [9, 9, 9, 9, 0, 0, nan, nan])
    close(reward(at_least=0.6), [9, 9, 1, 0, 0, 0, nan, nan])
    close(reward(top=0.3), [9, 9, 1, 0, 0, 0, nan, nan])  # one of three groups with a rate
    close(reward(top=0.5), [9, 9, 9, 9, 0, 0, nan, nan])  # a half of three: two
    close(reward(top=0), [1, 1, 1, 0, 0, 0, nan, nan])
    # Three groups that are all right: one of them, however many tie with it.
    tied = {"name": "by_pass_rate", "then": {"name": "constant", "value": 9}, "top": 0.3}
    close(column(make_batch([1.0] * 6, groups=["c", "c", "a", "a", "b", "b"]), tied), [1, 1, 9, 9, 1, 1])
    close(reward(top=1)[:6], [9] * 6)
    close(reward(at_least=0)[:6], [9] * 6)
    with pytest.raises(ConfigError, match="exclude each other"):
        reward(top=0.5, at_least=0.5)
