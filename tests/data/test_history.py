"""Per-prompt history counts what was decided, keeps the best, and survives a checkpoint."""

import json
import math
import tracemalloc

import numpy as np
import pytest

from rlvr import registry
from rlvr.data import History, Shuffle, TaskHistory, TaskPool
from rlvr.records import Task


def test_a_task_never_attempted_has_the_empty_record():
    assert History()["t"] == TaskHistory()
    assert (History()["t"].pass_rate, len(History())) == (None, 0)


def test_groups_add_up_and_undecided_attempts_only_count_as_attempts():
    history = History(answer_limit=2000)
    history.record("t", [1, 0, None, math.nan], ["a", "b", "c", "d"])
    history.record("t", [0, 0])
    record = history["t"]
    assert (record.attempts, record.decided, record.pass_rate, record.last_pass_rate) == (6, 4, 0.25, 0.0)
    assert (record.best_score, record.best_answer) == (1.0, "a")
    history.record("t", [None, None])
    assert (history["t"].attempts, history["t"].last_pass_rate) == (8, 0.0)


def test_the_first_of_equally_good_answers_is_kept_up_to_the_limit():
    history = History(answer_limit=3)
    history.record("t", [0.5, 0.5], ["first", "second"])
    assert history["t"].best_answer == "fir"
    history.record("t", [0.5, 0.75], ["third", "fourth"])
    assert (history["t"].best_score, history["t"].best_answer) == (0.75, "fou")


def test_the_state_is_json_and_goes_back():
    history, restored = History(answer_limit=10), History(answer_limit=10)
    history.record("a", [1 / 3, None], ["x", "y"])
    history.record("b", [None])
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert {task: restored[task] for task in restored} == {task: history[task] for task in history}
    history.record("a", [0.1])
    restored.record("a", [0.1])
    assert restored["a"] == history["a"]


def test_answers_are_kept_only_where_a_piece_declares_that_it_reads_them():
    class Reader(Shuffle):
        answer_characters = 4

    history, pool = History(), TaskPool([Task("t", "p")])
    assert Shuffle().bind(pool, seed=0, history=history).history is history  # also while it is empty
    history.record("t", [1], ["a long answer"])
    assert (history["t"].best_score, history["t"].best_answer) == (1.0, None)
    assert history.state_dict()["answers"] == {}
    Reader().bind(pool, seed=0, history=history)
    Shuffle().bind(pool, seed=0, history=history)
    history.record("t", [2], ["a long answer"])
    assert history["t"].best_answer == "a lo"
    history.record("t", [3])
    assert (history["t"].best_score, history["t"].best_answer) == (3.0, None)


def test_memory_and_state_are_small():
    count = 20_000
    ids = [f"task-{n}" for n in range(count)]
    history = History()
    tracemalloc.start()
    for task_id in ids:
        history.record(task_id, [1.0, 0.0, None], ["x" * 1000, "y", "z"])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept / count < 160  # five numbers, a row number, and the dictionary of ids, which takes up to 84
    assert len(json.dumps(history.state_dict())) / count < 50


def test_answers_that_do_not_match_the_scores_are_refused():
    with pytest.raises(ValueError, match="task t: 2 scores but 1 answers"):
        History().record("t", [1, 0], ["a"])


class Least(Shuffle):
    """Draws the two tasks that were attempted least."""

    def order(self, epoch, size):
        attempts = [self.history[f"t{n}"].attempts for n in range(size)]
        return np.argsort(attempts, kind="stable")[:2]


def test_the_sampler_of_every_stage_sees_what_the_run_recorded(make_trainer):
    """With an empty history it would draw the first two of six tasks again and again."""
    registry.register("sampler", "least_tried_in_a_test")(Least)
    stages = [{"kind": "grpo", "steps": 3}, {"kind": "grpo", "steps": 3}]
    trainer = make_trainer({"run": {"steps": 6}, "data": {"sampler": "least_tried_in_a_test"}, "stages": stages})
    trainer.train()
    assert all(stage.sampler.history is trainer.rollouts.history for stage in trainer.stages)
    assert {trainer.rollouts.history[f"t{n}"].attempts for n in range(6)} == {8}
