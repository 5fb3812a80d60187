"""The file of metrics: whole lines, cut past the checkpoint, and what is refused."""

from __future__ import annotations

import json

import pytest

from rlvr.errors import DataError
from rlvr.monitor.metrics import record
from rlvr.monitor.trackers import MetricsFile


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
