"""Evaluation against brute force: results by task, means by source, and the order of its work."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from rlvr.config.config_loading import load_config
from rlvr.evaluation import evaluate, summary, values_of
from rlvr.evaluation.task_result import TaskResult
from rlvr.records import Rollout, StopReason, Task, Verdict, VerdictStatus

ANSWERS = ["1", "2", "3", None]


class Counted(Rollout):
    """A rollout that a WeakSet can count."""

    __hash__ = object.__hash__


def judged(draw, member: int, greedy: bool) -> Rollout:
    """A rollout whose verdict follows from the task and the member."""
    random = np.random.default_rng([draw.number, member, greedy])
    answer = ANSWERS[int(random.integers(4))]
    verdict = Verdict.from_score(float(answer == "1"), answer=answer)
    if answer is None:
        verdict = Verdict(VerdictStatus.UNPARSABLE, 0.0)
    if random.random() < 0.1:
        verdict = Verdict.undecided("service down")
    tokens = int(random.integers(1, 9))
    return Counted(
        id=f"{draw.number}/{member}",
        task=draw.task,
        group=str(draw.number),
        member=member,
        token_ids=np.arange(tokens + 2),
        origin=np.asarray([0, 0] + [1] * tokens, dtype=np.int8),
        behaviour_logprobs=np.full(tokens + 2, np.nan, dtype=np.float32),
        policy_version=np.zeros(tokens + 2, dtype=np.int32),
        stop=StopReason.LENGTH if random.random() < 0.3 else StopReason.END,
        verdicts={"v": verdict},
    )


class Stub:
    """An engine that is none: makes rollouts up and counts those that are alive."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Rollout] = weakref.WeakSet()
        self.most = 0
        self.kept: list[Rollout] | None = None

    def __call__(self, draws, sampling, samples) -> list[Rollout]:
        made = [judged(draw, m, sampling.temperature == 0) for draw in draws for m in range(samples)]
        self.alive.update(made) if self.kept is None else self.kept.extend(made)
        self.most = max(self.most, len(self.alive))
        return made


def tasks_of(number: int) -> list[Task]:
    return [Task(f"t{i}", f"p{i}", source="easy" if i % 3 else "hard") for i in range(number)]


def config_of(**evaluation):
    return load_config({"evaluation": evaluation})


def test_results_are_those_of_brute_force():
    stub = Stub()
    stub.kept = []
    done = evaluate(tasks_of(12), config_of(samples=7, k=[1, 3, 7]), stub)
    greedy, sampled = stub.kept[:12], stub.kept[12:]
    decided = [r.verdict.score for r in greedy if r.verdict.score is not None]
    assert done.results["eval/greedy"] == pytest.approx(np.mean(decided))
    by_task = [[r for r in sampled if r.group == str(i) and r.verdict.score is not None] for i in range(12)]
    assert done.results["eval/mean"] == pytest.approx(np.mean([np.mean([r.verdict.score for r in m]) for m in by_task]))
    for k in (1, 3, 7):
        enough = [members for members in by_task if len(members) >= k]
        chances = [
            np.mean([any(r.verdict.score == 1 for r in subset) for subset in itertools.combinations(members, k)])
            for members in enough
        ]
        assert done.results[f"eval/pass@{k}"] == (pytest.approx(np.mean(chances), abs=1e-12) if chances else None)
        hard = [c for c, members in zip(chances, enough, strict=True) if members[0].task.source == "hard"]
        assert done.results[f"eval/hard/pass@{k}"] == (pytest.approx(np.mean(hard), abs=1e-12) if hard else None)
    everything = [*greedy, *sampled]
    assert done.results["eval/truncated"] == pytest.approx(np.mean([r.stop.truncated for r in everything]))
    assert done.results["eval/undecided"] == pytest.approx(np.mean([r.verdict.score is None for r in everything]))
    assert done.results["eval/length_mean"] == pytest.approx(np.mean([r.completion_length for r in everything]))
    assert done.results["eval/tasks"] == 12


def test_the_entropy_of_answers():
    stub = Stub()
    stub.kept = []
    done = evaluate(tasks_of(6), config_of(samples=20, greedy=False), stub)
    for i, result in enumerate(done.task_results):
        given = Counter(r.verdict.answer for r in stub.kept if r.group == str(i) and r.verdict.decided)
        given.pop(None, None)
        expected = stats.entropy(list(given.values()))
        assert result.answer_entropy == pytest.approx(expected)


@pytest.mark.parametrize("block", [1, 37, 10**9])
def test_results_do_not_depend_on_the_blocks(monkeypatch, block):
    asked = config_of(samples=5, k=[1, 2, 5])
    expected = evaluate(tasks_of(30), asked, Stub())
    monkeypatch.setattr(sys.modules["rlvr.evaluation.evaluation_loop"], "BLOCK", block)
    got = evaluate(tasks_of(30), asked, Stub())
    assert got.results == expected.results and got.task_results == expected.task_results


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tasks():
    """Of 64,000 rollouts, no more than two blocks are alive at any time; what is kept is a result for each task."""
    stub = Stub()
    done = evaluate(tasks_of(1000), config_of(samples=64, k=[1], greedy=False), stub)
    gc.collect()
    assert len(done.task_results) == 1000
    assert stub.most <= 2 * 4096
    assert len(stub.alive) == 0


def test_all_undecided_is_none():
    def collect(draws, sampling, samples):
        made = [judged(draw, m, False) for draw in draws for m in range(samples)]
        for rollout in made:
            rollout.verdicts = {"v": Verdict.undecided("down")}
        return made

    results = evaluate(tasks_of(3), config_of(samples=2, k=[1, 2]), collect).results
    assert [results[f"eval/{name}"] for name in ("greedy", "mean", "pass@1", "pass@2", "maj@2")] == [None] * 5
    assert results["eval/undecided"] == 1.0


# intervals


# comparison


def result_of(name: str, correct: int, greedy: float | None = None, samples: int = 8) -> TaskResult:
    return TaskResult(name, samples=samples, correct=correct, score=correct / samples, greedy=greedy, responses=samples)


def test_no_vote_without_answers():
    """A function that returns a number names no answer: maj@k is absent, not 0. Answers that could not be read lose."""
    rollouts = [judged(SimpleNamespace(number=0, task=Task("t", "?")), member, False) for member in range(4)]
    named, unread = Verdict.from_score(1.0, answer="1"), Verdict(VerdictStatus.UNPARSABLE, 0.0)
    for verdict, expected in ((Verdict.from_score(1.0), {}), (named, {4: 1.0}), (unread, {4: 0.0})):
        result = TaskResult("t")
        result.add_samples([replace(rollout, verdicts={"v": verdict}) for rollout in rollouts], [1, 4])
        assert result.majority == expected
    assert summary([TaskResult("t", samples=4, correct=4, score=1.0)], [1, 4], False, True)["maj@4"] is None


def test_values_and_summary_of_few_samples():
    task_results = [result_of("a", 1, samples=2), result_of("b", 1, samples=4)]
    np.testing.assert_array_equal(values_of(task_results, [4])["pass@4"], [np.nan, 1.0])
    got = summary([], [1], True, True)
    assert got["tasks"] == 0 and got["mean"] is None and got["truncated"] is None
    assert TaskResult.from_json({**task_results[0].to_json(), "majority": {"2": 0.5}}).majority == {2: 0.5}


# contamination


@pytest.mark.parametrize(("greedy", "counts"), [(False, [8 * 3, 30 * 3]), (True, [30, 30 * 4])])
def test_verdicts_are_judged_before_all_is_sampled(greedy, counts):
    """Without greedy responses those of the first few tasks are looked at: a broken verifier is not found at the
    end."""
    asked = []
    config = config_of(samples=3, greedy=greedy)
    done = evaluate(tasks_of(30), config, Stub(), judge=lambda raised: asked.append(raised.asked.total()))
    assert asked == counts
    assert done.results["eval/tasks"] == 30

    asked.clear()
    mixed = [replace(task, verifier="exact" if number > 9 else "math") for number, task in enumerate(tasks_of(30))]
    evaluate(mixed, config, Stub(), judge=lambda raised: asked.append(raised.asked.total()))
    assert asked == counts[greedy == 0 :]  # the first tasks may all be of one verifier

    def refuse(raised):
        raise RuntimeError("it always raises")

    drawn = Stub()
    drawn.kept = []
    with pytest.raises(RuntimeError, match="always raises"):
        evaluate(tasks_of(30), config, drawn, judge=refuse)
    assert len(drawn.kept) == counts[0]
