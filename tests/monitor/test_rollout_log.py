from __future__ import annotations

import json
import os
from datetime import date

import numpy as np
import pytest

from rlvr.errors import DataError
from rlvr.monitor.metrics import record
from rlvr.monitor.recording import read_rollouts
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.monitor.trackers import MetricsFile
from rlvr.monitor.whole_file import write_whole
from rlvr.records import Batch


def test_metrics_file_appends_whole_lines(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert list(file.rows()) == []
    file.append(record({"step": 1}))
    file.append(record({"step": 2, "reward/mean": 0.5}))
    assert [row["reward/mean"] for row in map(json.loads, file.path.read_text().splitlines())] == [None, 0.5]
    assert [row["step"] for row in file.rows()] == [1, 2]


def test_truncate_cuts_past_the_checkpoint_and_the_torn_line(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate_after(3)
    for step in range(1, 6):
        file.append({"step": step})
    with file.path.open("a") as torn:
        torn.write('{"step": 6, "rew')
    assert [row["step"] for row in file.rows()] == [1, 2, 3, 4, 5]
    file.truncate_after(3)
    file.append({"step": 4, "again": True})
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "again": true}\n'
    file.truncate_after(100)
    assert [row["step"] for row in file.rows()] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_line_that_is_no_record_is_refused(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_bytes(b'{"step": 1}\n\x00\xff\x00\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        list(file.rows())


def test_metrics_file_refuses_what_is_not_json(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        file.append({"step": 1, "lr": float("nan")})
    assert not file.path.exists()


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


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    """As root, a rename over /dev/full or /dev/stdout would take the device's place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_file_reaches_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """A power cut after the rename leaves the old content or the new one, and no file of zero bytes."""
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: order.append(os.fstat(number).st_size) or fsync(number))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("renamed") or replace(*paths))
    write_whole(tmp_path / "config.yaml", "run: {}\n")
    assert order == [8, "renamed"]
