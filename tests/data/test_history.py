"""Per-prompt history counts what was decided, keeps the best, and survives a checkpoint."""

import json
import math

import pytest

from rlvr.data import History, TaskHistory


def test_a_task_never_attempted_has_the_empty_record():
    assert History()["t"] == TaskHistory()
    assert (History()["t"].pass_rate, len(History())) == (None, 0)


def test_groups_add_up_and_undecided_attempts_only_count_as_attempts():
    history = History()
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
    history, restored = History(), History()
    history.record("a", [1 / 3, None], ["x", "y"])
    history.record("b", [None])
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert {task: restored[task] for task in restored} == {task: history[task] for task in history}
    history.record("a", [0.1])
    restored.record("a", [0.1])
    assert restored["a"] == history["a"]


def test_answers_that_do_not_match_the_scores_are_refused():
    with pytest.raises(ValueError, match="task t: 2 scores but 1 answers"):
        History().record("t", [1, 0], ["a"])
