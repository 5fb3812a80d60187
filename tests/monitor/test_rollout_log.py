from __future__ import annotations

import subprocess
import sys
import time
from datetime import date

import numpy as np
import pytest

from rlvr.errors import DataError
from rlvr.monitor.recording import read_rollouts
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.records import Batch


def test_rollouts_round_trip(tmp_path, rollout):
    batch = Batch(
        [rollout("a", 0, 1.0, text="odd \x1b \ud800 😀\u2028"), rollout("a", 1, None)],
        {"reward": np.asarray([1.0, np.nan]), "advantage": np.asarray([0.25, np.nan])},
    )
    path = RolloutLog(tmp_path, every=4).write(12, batch)
    assert path == tmp_path / "rollouts" / "step-000012.jsonl"
    rollouts, columns = read_rollouts(path)
    assert [r.to_json() for r in rollouts] == [r.to_json() for r in batch.rollouts]
    assert rollouts[1].verdict is not None
    assert rollouts[1].verdict.score is None
    for name in ("reward", "advantage"):
        np.testing.assert_array_equal(columns[name], batch.columns[name])
        assert columns[name].dtype == np.float64
    assert [p.name for p in path.parent.iterdir()] == ["step-000012.jsonl"]


def test_rollouts_are_written_when_due(tmp_path, rollout):
    batch = Batch([rollout()])
    log = RolloutLog(tmp_path, every=5)
    assert log.write(4, batch) is None
    assert not log.directory.exists()
    assert not RolloutLog(tmp_path, every=0).due(5)
    for step in (5, 10, 15):
        log.write(step, batch)
    names = ["step-000005.jsonl", "step-000010.jsonl", "step-000015.jsonl"]
    assert sorted(p.name for p in log.directory.iterdir()) == names


def test_rollouts_are_kept_up_to_a_number_of_bytes_the_first_and_the_newest(tmp_path, rollout):
    batch = Batch([rollout()])
    (tmp_path / "one").mkdir()
    size = RolloutLog(tmp_path / "one").write(1, batch).stat().st_size
    (tmp_path / "rollouts").mkdir()
    mine = [tmp_path / "rollouts" / name for name in ("notes.txt", "step-x.jsonl", "step-000900.jsonl")]
    for path in mine:
        path.write_bytes(bytes(10 * size))
    kept = {3: [1, 2, 3], 8: range(1, 9), 9: [1, 2, *range(4, 10)], 12: [1, 2, *range(7, 13)]}
    log = RolloutLog(tmp_path, limit=8.5 * size)
    for step in range(1, 13):
        if step == 6:  # goes on in another process
            log = RolloutLog(tmp_path, limit=8.5 * size)
        log.write(step, batch)
        if step in kept:
            result = [int(path.stem[5:]) for path in sorted(log.directory.glob("step-0*")) if path not in mine]
            assert result == [*kept[step]]
    assert all(path.stat().st_size == 10 * size for path in mine)
    RolloutLog(tmp_path, limit=1).write(13, batch)
    assert [path.stem for path in sorted(log.directory.glob("step-0*"))] == ["step-000013", "step-000900"]


def test_odd_answers_and_an_empty_batch_are_written(tmp_path, rollout):
    log = RolloutLog(tmp_path)
    path = log.write(1, Batch([rollout(answer=date(2026, 8, 1), info={"tests": np.asarray([1, 2])})]))
    assert path is not None
    task = read_rollouts(path)[0][0].task
    assert task.answer == "2026-08-01"
    assert task.info["tests"] == [1, 2]
    empty = log.write(2, Batch([]))
    assert empty is not None
    assert read_rollouts(empty) == ([], {})


def test_a_failed_write_leaves_the_old_file(tmp_path, rollout):
    log = RolloutLog(tmp_path)
    path = log.write(1, Batch([rollout()]))
    assert path is not None
    before = path.read_text()
    with pytest.raises(TypeError):
        log.write(1, Batch([rollout(info={("a", "b"): 1})]))
    assert path.read_text() == before


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}', '{"columns": 1}'])
def test_a_line_that_is_no_rollout_is_named(tmp_path, rollout, line):
    path = RolloutLog(tmp_path).write(1, Batch([rollout()]))
    assert path is not None
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"step-000001\.jsonl, line 2: not a rollout"):
        read_rollouts(path)


HANGING_DISK = """
import sys, threading, time
from rlvr.monitor import rollout_log
log = rollout_log.RolloutLog(sys.argv[1])
log.write = lambda *_: time.sleep(600)
log.later(1, None, [], [], None)
rollout_log.EXIT_SECONDS = rollout_log.WRITE_SECONDS = 0.5
if sys.argv[2] == "closed":
    log.close()
print("ended")
"""


@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_a_disk_that_hangs_does_not_keep_the_program_from_ending(tmp_path, how):
    program = [sys.executable, "-c", HANGING_DISK, str(tmp_path), how]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "ended\n"
    assert ended.stderr.count("the last file of rollouts was not written: waited") == 1


def test_close_waits_for_the_file_of_the_last_step(tmp_path, rollout):
    log = RolloutLog(tmp_path)
    write = log.write

    def slow(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    log.write = slow
    log.later(1, Batch([rollout()]), [], [], None)
    log.close()
    assert [path.name for path in log.directory.iterdir()] == ["step-000001.jsonl"]


SLOW_DISK = """
import pathlib, sys, time
from rlvr.monitor import rollout_log
log = rollout_log.RolloutLog(sys.argv[1])
def slow(*_):
    time.sleep(1)
    pathlib.Path(sys.argv[1], "written").touch()
log.write = slow
log.later(1, None, [], [], None)
"""


def test_the_end_of_a_program_that_closes_nothing_waits_for_the_last_file(tmp_path):
    subprocess.run([sys.executable, "-c", SLOW_DISK, str(tmp_path)], timeout=120, check=True)
    assert (tmp_path / "written").exists()
