"""docs/when-it-does-not-learn.md shows what the monitors said of real runs that were broken, and they still say it."""

from __future__ import annotations

import json
import re

import pytest

from rlvr.monitor.health import MONITORS

QUICK = ["truncated", "duplicates", "lr_zero"]
"""Broken runs of a second or two, besides the start policy's four."""


@pytest.fixture(scope="module")
def record(script):
    """scripts/broken_runs/record.py as a module."""
    return script("broken_runs/record")


@pytest.fixture(scope="module")
def start(root, record, tmp_path_factory):
    """A folder for runs, and the policy that they start with in it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        return folder, record.start_policy(folder)


def test_there_is_a_broken_run_for_every_monitor(record):
    assert list(record.RUNS["broken"]) == list(MONITORS)
    assert [name for name, run in record.RUNS["broken"].items() if "change" not in run] == ["lr_zero"]


def test_each_recorded_run_ends_with_its_monitor_in_its_present_words(record):
    kept = json.loads(record.RECORD.read_text(encoding="utf-8"))
    assert list(kept) == list(MONITORS)
    for name, output in kept.items():
        assert name in {row["monitor"] for row in output if row["step"] == output[-1]["step"]}
        for row in output:
            words = re.split(r"\{[^}]*\}", MONITORS[row["monitor"]].message)
            assert re.fullmatch(".*".join(map(re.escape, words)), row["message"]), row
            assert 1 <= row["since"] <= row["step"]


def test_the_page_holds_the_record(record):
    kept = json.loads(record.RECORD.read_text(encoding="utf-8"))
    page = record.PAGE.read_text(encoding="utf-8")
    assert record.with_block(page, record.block(kept)) == page
    assert all(row["message"] in page for output in kept.values() for row in output)


def test_only_what_stands_between_the_marks_is_written(record):
    page = f"a\n{record.BEGIN}old\n{record.END}b\n"
    assert record.with_block(page, "new") == f"a\n{record.BEGIN}\nnew\n{record.END}b\n"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MONITORS])
def test_a_broken_run_makes_its_monitor_speak(record, start, name, root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    result = record.broken(name, tmp_path, start[1])
    assert name in {finding.monitor for finding in result}
    assert result[-1].step <= 60


@pytest.mark.slow
def test_of_the_healthy_run_no_monitor_speaks(record, start, root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    result = [finding.monitor for finding in record.healthy(tmp_path, start[1])]
    assert [name for name in result if name != "slow"] == []  # `slow` sees what else this machine does
