"""Labels from votes, against values worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from reward_helpers import make_batch
from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.rewards import RewardContext, bind, build_terms, check, score


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def voted(column, answers, scores=None, groups=None, **options):
    batch = make_batch(scores or [0.0] * len(answers), groups=groups, answers=answers)
    return column(batch, {"name": "majority_vote", **options})


def test_the_majority_is_right_whatever_the_verdict(column, nan):
    close(voted(column, ["3", "4", "3", None]), [1, 0, 1, 0])
    close(
        voted(column, ["3", "4", "3"], [0.0, 1.0, None]), [0.5, 0.5, nan]
    )  # an undecided verdict has no answer: a tie of two
    close(voted(column, ["3", "4"]), [0.5, 0.5])
    close(voted(column, ["3", "4", "4", "3", "5"]), [0.5, 0.5, 0.5, 0.5, 0])
    close(voted(column, [None, None]), [nan, nan])
    close(voted(column, ["7"]), [1])
    close(voted(column, ["3", "3", "1", "1", "1"], groups=["a", "a", "b", "b", "b"]), [1] * 5)


def test_a_share_is_a_soft_label_and_a_weak_majority_is_no_label(column, nan):
    close(voted(column, ["3", "4", "3", None], of="share"), [2 / 3, 1 / 3, 2 / 3, 0])
    close(voted(column, ["3", "4", "3"], at_least=0.7), [nan] * 3)
    close(voted(column, ["3", "4", "3"], at_least=0.6), [1, 0, 1])


def test_a_group_of_hundreds_votes(column):
    answers = [str(i % 10) for i in range(300)] + ["3"]
    got = voted(column, answers)
    assert got.sum() == 31
    assert all(value == (answer == "3") for value, answer in zip(got, answers, strict=True))


def test_answers_are_the_same_as_the_verifier_sees_it(column):
    batch = make_batch([0.0] * 3, answers=["1/2", "0.5", "3"])
    same = RewardContext(Config(), [], lambda task, a, b: {a, b} == {"1/2", "0.5"})
    terms = bind(build_terms(["majority_vote"]), same)
    close(score(batch, terms).column("reward"), [1, 1, 0])


def test_the_partners_vote_is_the_label(column, nan):
    tasks = {g: Task(id=g, prompt="?", info={"partner": p}) for g, p in (("a", "b"), ("b", "a"))}
    batch = make_batch(
        [0.0] * 6, groups=["a", "a", "a", "b", "b", "b"], answers=["1", "2", "2", "1", "1", "2"], tasks=tasks
    )
    close(column(batch, {"name": "majority_vote", "of": "partner"}), [1, 0, 0, 0, 0, 1])
    alone = bind(
        build_terms([{"name": "majority_vote", "of": "partner"}]), RewardContext(Config(), list(tasks.values()))
    )
    close(score(batch.select([0, 1, 2]), alone).column("reward"), [nan] * 3)
    tasks["b"] = Task(id="b", prompt="?", info={"partner": "c"})
    with pytest.raises(ConfigError, match=r"needs info\.partner.*task 'a' has|task 'b' has"):
        column(make_batch([0.0] * 2, groups=["a", "b"], tasks=tasks), {"name": "majority_vote", "of": "partner"})


def test_one_does_not_vote():
    with pytest.raises(ConfigError, match=r"majority_vote makes a label.*group_size is 1"):
        check(build_terms(["majority_vote"]), load_config({"rollout": {"group_size": 1}}))


# certainty
