"""Best of k against all subsets, levels of difficulty, several runs on the same tasks, k in the hundreds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from rlvr.config.config_loading import load_config
from rlvr.errors import DataError
from rlvr.evaluation import best_of_k, evaluate, interval, over_runs
from rlvr.evaluation.paired_comparison import compare
from rlvr.evaluation.task_result import TaskResult, by_difficulty
from rlvr.records import Rollout, StopReason, Task, Verdict


def expected_best(ranking, scores, k):
    """The mean over all subsets of k of the score of the one liked best; of several, their mean."""
    result = []
    for subset in itertools.combinations(range(len(scores)), k):
        most = max(-math.inf if math.isnan(ranking[i]) else ranking[i] for i in subset)
        top = [scores[i] for i in subset if (-math.inf if math.isnan(ranking[i]) else ranking[i]) == most]
        result.append(np.mean(top))
    return np.mean(result)


@pytest.mark.parametrize("seed", range(12))
def test_best_of_k_is_the_mean_over_all_subsets(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 9))
    ranking = random.integers(0, 4, count).astype(float)  # with samples that are liked alike
    ranking[random.random(count) < 0.2] = np.nan
    scores = random.choice([0.0, 0.5, 1.0], count)
    for k in range(1, count + 1):
        assert best_of_k(ranking, scores, k) == pytest.approx(expected_best(ranking, scores, k), abs=1e-12)


def test_best_of_k_at_its_ends():
    random = np.random.default_rng(0)
    scores = random.random(300)
    assert best_of_k(random.random(300), scores, 1) == pytest.approx(scores.mean())
    ranking = random.random(300)
    assert best_of_k(ranking, scores, 300) == scores[ranking.argmax()]
    right = (scores > 0.9).astype(float)
    chance = 1 - math.comb(300 - int(right.sum()), 256) / math.comb(300, 256)
    assert best_of_k(right, right, 256) == pytest.approx(chance)  # an oracle's best@k is pass@k
    assert best_of_k(np.full(300, np.nan), scores, 7) == pytest.approx(scores.mean())
    for k in (0, 301):
        with pytest.raises(ValueError, match=f"best@{k}"):
            best_of_k(scores, scores, k)


def test_best_of_k_covers_its_estimand():
    """The mean of the estimates is the true value: the better of two draws, liked by a noisy scorer."""
    random = np.random.default_rng(1)
    estimates, draws = [], []
    for _ in range(4000):
        right = (random.random(6) < 0.4).astype(float)
        ranking = right + random.normal(size=6)
        estimates.append(best_of_k(ranking, right, 2))
        draws.append(right[:2][ranking[:2].argmax()])
    assert np.mean(estimates) == pytest.approx(np.mean(draws), abs=0.025)


# a whole evaluation


def sampled(draw, member: int, right: bool, logprob: float) -> Rollout:
    return Rollout(
        id=f"{draw.number}/{member}",
        task=draw.task,
        group=str(draw.number),
        member=member,
        token_ids=np.arange(3),
        origin=np.asarray([0, 0, 1], dtype=np.int8),
        behaviour_logprobs=np.asarray([np.nan, np.nan, logprob], dtype=np.float32),
        policy_version=np.zeros(3, dtype=np.int32),
        stop=StopReason.END,
        verdicts={"v": Verdict.from_score(float(right), answer=str(right))},
    )


def collect(draws, sampling, samples):
    made = []
    for draw in draws:
        random = np.random.default_rng([draw.number, samples])
        for member in range(samples):
            right = bool(random.random() < 0.1)
            made.append(sampled(draw, member, right, -1.0 + 0.5 * right + 0.4 * random.normal()))
    return made


def likelihood(rollouts):
    return np.asarray([float(r.behaviour_logprobs[-1]) for r in rollouts])


def test_a_scorer_gives_best_of_k_and_levels_give_tables():
    tasks = [Task(f"t{i}", "p", info={"level": i % 3 + 1}) for i in range(9)]
    config = load_config({"evaluation": {"samples": 300, "k": [1, 4, 256], "greedy": False, "difficulty": "level"}})
    results = evaluate(tasks, config, collect, scorer=likelihood).results
    assert results["eval/mean"] < results["eval/best@4"] < results["eval/pass@4"]
    assert results["eval/best@256"] <= results["eval/pass@256"] == pytest.approx(1.0, abs=1e-9)
    by_level = [results[f"eval/difficulty/{level}/best@4"] for level in (1, 2, 3)]
    assert np.mean(by_level) == pytest.approx(results["eval/best@4"])
    assert "eval/best@1" not in results and "eval/difficulty/1/maj@4" not in results
    assert not any("best@" in name for name in evaluate(tasks, config, collect).results)


def levels_of(*difficulties):
    return {
        level: [t.id for t in members]
        for level, members in by_difficulty(
            [TaskResult(str(i), difficulty=d) for i, d in enumerate(difficulties)]
        ).items()
    }


def test_levels_of_difficulty():
    assert levels_of("hard", None, "easy", "hard") == {"easy": ["2"], "hard": ["0", "3"]}
    assert levels_of(10, 2, 2.5, 10) == {"2": ["1"], "2.5": ["2"], "10": ["0", "3"]}
    assert levels_of(None, None) == {}
    assert levels_of(*(f"word {i}" for i in range(30))) == {}
    ranges = levels_of(*(i / 100 for i in range(100)))
    assert [len(members) for members in ranges.values()] == [20] * 5
    assert next(iter(ranges)) == "0 to 0.198"
    mostly = levels_of(*[0.0] * 90, *(i / 100 for i in range(1, 20)))
    assert sum(map(len, mostly.values())) == 109  # however the numbers lie, no task is lost
    assert levels_of(2, "2", 3) == {"2": ["1"], "3": ["2"]} or len(levels_of(2, "2", 3)) == 3


# several runs


def runs_of(matrix):
    return [
        [TaskResult(f"t{i}", samples=4, correct=int(4 * v), score=v, greedy=None) for i, v in enumerate(row)]
        for row in matrix
    ]


def test_runs_are_put_together_as_rliable_does():
    matrix = np.random.default_rng(0).choice([0.0, 0.25, 0.5, 1.0], (3, 40))
    got = over_runs(runs_of(matrix), [1, 4])["mean"]
    assert got["mean"] == pytest.approx(matrix.mean())
    assert got["iqm"] == pytest.approx(stats.trim_mean(matrix.reshape(-1), 0.25))
    assert got["runs"] == pytest.approx(matrix.mean(axis=1))
    assert got["tasks"] == 40
    # The stratified bootstrap by hand: within each task, runs are drawn with replacement.
    random = np.random.default_rng(7)
    drawn = [np.mean([matrix[random.integers(3, size=3), task] for task in range(40)]) for _ in range(3000)]
    np.testing.assert_allclose(got["interval"], np.quantile(drawn, [0.025, 0.975]), atol=0.01)
    low, high = got["iqm interval"]
    assert low <= got["iqm"] <= high
    whole = interval(matrix.mean(axis=0))
    assert (
        whole is not None and got["interval"][1] - got["interval"][0] < whole[1] - whole[0]
    )  # tasks are fixed, runs are not


def test_only_tasks_that_all_runs_have_count():
    runs = runs_of([[0.0, 1.0, 0.5], [1.0, 1.0, 0.5]])
    runs[1].reverse()
    runs[1].append(TaskResult("more", samples=4, correct=4, score=1.0))
    runs[0][2].score = None
    got = over_runs(runs, [1])
    assert (got["mean"]["tasks"], got["mean"]["mean"], got["mean"]["runs"]) == (2, 0.75, [0.5, 1.0])
    assert "greedy" not in got
    with pytest.raises(DataError, match="no task in common"):
        over_runs([runs[0], [TaskResult("other")]], [1])
    with pytest.raises(DataError):
        over_runs([], [1])


def test_only_one_of_two_compared_evaluations_had_a_scorer():
    plain = [TaskResult("t", samples=2, correct=1, score=0.5)]
    scored = [TaskResult("t", samples=2, correct=1, score=0.5, best={1: 0.5, 2: 1.0})]
    for before, after in ((plain, scored), (scored, plain)):
        rows = compare(before, after, [1, 2])["differences"]
        assert "pass@1" in rows and not any(name.startswith("best@") for name in rows)
