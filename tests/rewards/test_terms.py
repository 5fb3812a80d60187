"""From verdicts and functions to the reward column."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlvr import GRPOTrainer
from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.records import Batch, Task, Verdict
from rlvr.rewards import RewardContext, Term, bind, build_terms, score


@pytest.fixture
def batch(make_rollout):
    """Four rollouts: right, wrong, undecided, without a verdict."""
    verdicts = [Verdict.from_score(1.0), Verdict.from_score(0.0), Verdict.undecided("service down"), None]
    rollouts = []
    for i, verdict in enumerate(verdicts):
        task = Task(id=f"t{i}", prompt="2+2?", answer="4", info={"level": i})
        rollout = make_rollout([1, 2, 3, *([4] * (i + 1))], prompt=3, text="x" * i, task=task)
        if verdict is not None:
            rollout.verdicts["math"] = verdict
        rollouts.append(rollout)
    return Batch(rollouts)


def column(batch, *specs):
    return score(batch, build_terms(specs)).column("reward")


def test_the_verdict_is_the_score(batch):
    np.testing.assert_array_equal(column(batch, "verdict"), [1.0, 0.0, np.nan, np.nan])
    np.testing.assert_array_equal(batch.column("reward/verdict"), batch.column("reward"))
    assert batch.column("reward").dtype == np.float64


def test_the_weighted_sum_and_what_is_undecided_stays_so(batch):
    def bonus(completion):
        return len(completion) if len(completion) != 1 else None

    got = column(batch, {"name": "verdict", "weight": 2}, {"name": "length", "per": 10, "weight": -0.5}, bonus)
    np.testing.assert_allclose(got, [2 * 1 - 0.5 * 0.1 + 0, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(batch.column("reward/length"), [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_array_equal(batch.column("reward/bonus"), [0, np.nan, 2, 3])
    np.testing.assert_array_equal(batch.column("reward/verdict"), [1, 0, np.nan, np.nan])


def test_a_term_that_weighs_nothing_leaves_the_reward_decided(batch):
    got = column(batch, {"name": "length", "per": 1}, {"name": "verdict", "weight": 0})
    np.testing.assert_array_equal(got, [1, 2, 3, 4])
    np.testing.assert_array_equal(batch.column("reward/verdict"), [1, 0, np.nan, np.nan])


def test_the_first_verdict_is_the_tasks_own(batch):
    batch.rollouts[0].verdicts["style"] = Verdict.from_score(0.25)
    assert column(batch, "verdict")[0] == 1.0


def test_plain_functions_get_what_they_ask_for_by_name(batch):
    seen = []

    def by_name(level, completion, answer, prompt, task, messages, token_ids, *, absent="none"):
        seen.append((level, completion, answer, prompt, task.id, messages, token_ids, absent))
        return level / 4

    np.testing.assert_array_equal(column(batch, by_name), [0, 0.25, 0.5, 0.75])
    assert seen[1] == (1, "x", "4", "2+2?", "t1", [{"role": "user", "content": "2+2?"}], [4, 4], "none")

    def everything(**known):
        return len(known["completion"])

    np.testing.assert_array_equal(column(batch, everything), [0, 1, 2, 3])

    def asks_too_much(completion, rubric):
        return 1.0

    with pytest.raises(ConfigError, match=r"rubric.*t0"):
        column(batch, asks_too_much)


def test_bools_and_numpy_numbers_are_scores_and_nonsense_is_undecided(batch):
    answers = [True, np.float32(0.5), math.inf, "no number"]

    def mixed(level):
        return answers[level]

    np.testing.assert_array_equal(column(batch, mixed), [1.0, 0.5, np.nan, np.nan])


def test_a_function_of_the_batch_sees_all_of_it(batch):
    def rank(batch):
        lengths = np.asarray([len(r) for r in batch.rollouts])
        return np.argsort(np.argsort(lengths))

    np.testing.assert_array_equal(column(batch, rank), [0, 1, 2, 3])


def test_a_function_that_raises_leaves_its_rollout_undecided_and_is_counted(batch):
    def brittle(level):
        if level in (1, 2):
            raise ZeroDivisionError(f"at {level}")
        return 1.0

    terms = build_terms([brittle])
    for _ in range(2):  # the second time its values are known
        np.testing.assert_array_equal(score(batch, terms).column("reward"), [1, np.nan, np.nan, 1])
    (function,) = [term.function for term in terms]
    assert (function.calls, function.raised) == (4, 2)
    assert function.traceback.endswith("ZeroDivisionError: at 2")


@pytest.mark.parametrize("values", [1.0, [1.0, 2.0], [[1.0], [2.0], [3.0], [4.0]], []])
def test_a_wrong_shape_is_refused_by_name(batch, values):
    def short(batch):
        return np.asarray(values)

    with pytest.raises(ConfigError, match=r"'short' returned shape .* for 4 rollouts"):
        column(batch, short)


def test_infinite_terms_are_undecided(batch):
    term = Term("given", lambda batch: np.asarray([1.0, np.inf, -np.inf, np.nan]), 2.0)
    np.testing.assert_array_equal(score(batch, [term]).column("reward"), [2.0, np.nan, np.nan, np.nan])


def test_names_must_differ_and_weights_be_numbers(tmp_path):
    with pytest.raises(ConfigError, match="'verdict' stands there twice"):
        build_terms(["verdict", {"name": "verdict", "weight": 2}])
    for weight in ("heavy", True, None):
        with pytest.raises(ConfigError, match="weight of 'verdict'"):
            build_terms([{"name": "verdict", "weight": weight}])
    with pytest.raises(ConfigError, match="verdict"):
        build_terms(["verdit"])
    with pytest.raises(ConfigError, match="no option"):
        build_terms([{"name": "length", "pre": 10}])


def test_terms_from_a_file(tmp_path, batch):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "def short(completion, *, limit=2):\n    return float(len(completion) < limit)\n\n\n"
        "def whole(batch, *, value=1.0):\n    return [value] * len(batch)\n"
    )
    got = column(batch, f"{file}:short", {"name": f"{file}:whole", "value": 3.0, "weight": 0.5})
    np.testing.assert_array_equal(got, [2.5, 2.5, 1.5, 1.5])
    assert set(batch.columns) == {"reward/short", "reward/whole", "reward"}


def test_scoring_twice_replaces_the_columns_and_no_rollouts_are_no_error(batch):
    first = column(batch, "length").copy()
    np.testing.assert_array_equal(column(batch, "length"), first)
    assert column(Batch([]), "verdict", "length").shape == (0,)


@pytest.mark.parametrize("term", ["verdict", "verdict_spans"])
def test_a_name_under_which_no_rollout_has_a_verdict_is_refused(term):
    """Where the plan adds verdicts, what is near to a known name is refused alone."""
    config = Config.model_validate({"verifier": "exact", "verifiers": {"quality": "math"}})
    tasks = [Task("t", "1+1=", "2", verifier="choice")]

    def bound(name, adds):
        return bind(build_terms([{"name": term, "verifier": name}]), RewardContext(config, tasks, adds_verdicts=adds))

    for name in ("quality", "exact", "choice"):
        assert bound(name, False) and bound(name, True)
    assert bound("turn 1", True)
    for name, adds, message in (
        ("turn 1", False, "there is no verifier 'turn 1' in `verifiers`; known: quality"),
        ("qualty", False, "did you mean 'quality'"),
        ("qualty", True, "did you mean 'quality'"),
    ):
        with pytest.raises(ConfigError, match=message):
            bound(name, adds)


def test_a_run_whose_reward_names_no_verifier_is_refused_at_its_start(tmp_path):
    tree = {
        "run": {"dir": str(tmp_path), "steps": 1},
        "model": {"scratch": {}, "device": "cpu"},
        "data": {"train": [{"prompt": "1+1=", "answer": "2"}]},
        "verifier": "exact",
        "rollout": {"engine": "hf", "max_new_tokens": 4},
        "rewards": ["verdict", {"name": "verdict", "verifier": "quality", "as": "q"}],
    }
    with (
        pytest.raises(ConfigError, match="rewards: there is no verifier 'quality' in `verifiers`"),
        GRPOTrainer(config=tree) as trainer,
    ):
        trainer.train()
