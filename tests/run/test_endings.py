"""Ends of a run that come from outside: a terminal that is closed, a lock or a folder that is removed, and their last
lines."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from resume_helpers import Run, merged, short_tree
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rlvr import GRPOTrainer, registry
from rlvr.config import CheckpointConfig
from rlvr.core.waits import StopRequest
from rlvr.distributed import World
from rlvr.distributed.checkpoint_writer import Contents, Writer
from rlvr.errors import ConfigError, TrainingError, command
from rlvr.monitor.trackers import MetricsFile
from rlvr.run import run_lock
from rlvr.run.run_lock import RunLock

# signals


@pytest.fixture
def not_under_nohup():
    """Processes that are started take SIGHUP as they do in a terminal, also where these tests were started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=["HUP", "INT"])
def test_a_closed_terminal_and_ctrl_c_save_the_last_step(tmp_path, number):
    """A shell that ends sends SIGHUP twice; Ctrl-C is answered before the step is left."""
    tree = short_tree(tmp_path, pause=600.0, verification={"time_limit": 900})
    tree["verifier"] = "exact"
    with Run(merged(tree, {"run": {"steps": 10**6}}), resume=None) as run:
        assert run.wait(lambda: run.lines() >= 2)
        run.signal(number)
        if number == signal.SIGHUP:
            run.signal(number)
        assert run.end() == 128 + number, run.said()
        steps = run.lines()
    assert (run.folder / "checkpoints" / f"step-{steps}" / "complete.json").is_file()
    said = "stopping as soon as this step can be left, with a checkpoint; Ctrl-C once more stops at once"
    assert (said in run.said()) == (number == signal.SIGINT)


STARTS_AND_CLOSES = """
import os, signal, sys
from rlvr import trainer, train
make, close = trainer.GRPOTrainer.__init__, trainer.GRPOTrainer.close

def asked(function):
    def ask(*arguments, **options):
        os.kill(os.getpid(), signal.SIGUSR1)
        return function(*arguments, **options)
    return ask

trainer.GRPOTrainer.__init__, trainer.GRPOTrainer.close = asked(make), asked(close)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.alone
def test_a_run_that_starts_or_closes_answers_sigusr1_and_goes_on(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(short_tree(tmp_path, verifier="exact", run={"steps": 1})))
    command = [sys.executable, "-c", STARTS_AND_CLOSES, "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("phase: ")] == [
        "phase: starting",
        "phase: closing",
    ]


def test_a_hangup_that_is_ignored_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_hangup_while_the_run_is_closed_is_ignored(not_under_nohup):
    """A shell may send it after the loop was left."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)  # to this thread: to the process, it may come later by another
        assert stop.signal == signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    with StopRequest():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) == before


# the lock and the folder


@pytest.mark.alone
def test_a_lock_that_is_removed_keeps_others_out_and_is_made_again(tmp_path):
    tree = short_tree(tmp_path, verifier="exact", run={"steps": 10**6})
    with Run(tree, resume=None) as run:
        assert run.wait(lambda: run.lines() >= 1)
        lock = run.folder / "run.lock"
        lock.unlink()
        with pytest.raises(ConfigError, match="is in use by"):
            RunLock(run.folder)
        assert run.wait(lambda: lock.exists() and f"process {run.process.pid} " in lock.read_text())
        with pytest.raises(ConfigError, match=f"is in use by process {run.process.pid} "):
            RunLock(run.folder)
        run.signal(signal.SIGTERM)
        assert run.end() == 143


@pytest.mark.alone
def test_a_run_whose_folder_is_removed_stops_in_one_line(tmp_path):
    tree = short_tree(tmp_path, verifier="exact", run={"steps": 10**6})
    with Run(tree, resume=None) as run:
        assert run.wait(lambda: run.lines() >= 2)
        os.rename(run.folder, tmp_path / "away")  # at once, as a removal under a writer is not
        shutil.rmtree(tmp_path / "away")
        assert run.end() == 1, run.said()
    last = run.said().splitlines()[-1]  # after what became of a checkpoint that was being written
    assert last.startswith("error: the run folder ")
    assert "is gone: it was removed or renamed while the run was writing to it" in last
    assert "Traceback" not in run.said()
    assert not run.folder.exists()


@pytest.mark.parametrize("when", ["before the write", "before its model"])
def test_a_run_folder_that_is_removed_while_a_checkpoint_is_written_stays_away(tmp_path, caplog, when):
    """Neither the writer nor transformers, which makes the folder that it saves to with its parents, leaves one."""
    folder = tmp_path / "run"
    folder.mkdir()
    writer = Writer(folder / "checkpoints", CheckpointConfig(), World())
    if when == "before the write":
        shutil.rmtree(folder)
        assert not writer.open(1)
    else:
        assert writer.open(1)
        logged = []

        def models(aside):
            shutil.rmtree(folder)
            (aside / "model").mkdir(parents=True)
            (aside / "model" / "config.json").write_text("{}")

        class Slow(logging.Handler):
            def emit(self, record):
                time.sleep(0.2)
                logged.append(record.getMessage())

        with caplog.at_level(logging.ERROR, "rlvr"):
            logging.getLogger("rlvr").addHandler(slow := Slow())
            writer.write(Contents(1, {"w": torch.zeros(2)}, models=models))
            assert "was removed or renamed meanwhile" in str(writer.wait())
            logging.getLogger("rlvr").removeHandler(slow)
        assert len(logged) == 1, "who waits has the last word"
    assert "the checkpoint of step 1 could not be written to" in caplog.text
    assert not folder.exists()


def test_a_run_folder_that_is_removed_after_it_was_checked_is_not_made_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    lock = RunLock(folder)
    real = run_lock._is_at

    def removed_in_between(descriptor, path):
        there = real(descriptor, path)
        if path == folder:
            shutil.rmtree(folder)
        return there

    monkeypatch.setattr(run_lock, "_is_at", removed_in_between)
    with pytest.raises(TrainingError, match=f"^the run folder {folder} is gone: it was removed or renamed"):
        lock.check()
    with pytest.raises(TrainingError, match=f"^the run folder {folder} is gone: it was removed or renamed"):
        MetricsFile(folder / "metrics.jsonl").append({"step": 1})
    lock.release()
    assert not folder.exists()


def test_a_trainer_whose_folder_another_one_took_stops(tmp_path):
    tree = short_tree(tmp_path, verifier="exact", logging={"console": "off"})
    with GRPOTrainer(config=tree) as first:
        first.train(1)
        with GRPOTrainer(config=tree) as second:
            second.train(1, resume="auto")
            with pytest.raises(TrainingError, match="taken over by another trainer of this process"):
                first.train(1)
            second.train(1)
            assert [row["step"] for row in second.folder.metrics.rows()] == [1, 2, 3]


def test_the_first_step_after_a_resume_says_nothing_of_the_speed(tmp_path):
    tree = short_tree(tmp_path, verifier="exact", logging={"console": "off"})
    with GRPOTrainer(config=merged(tree, {"run": {"steps": 2}})) as trainer:
        trainer.train()
    with GRPOTrainer(config=tree) as trainer:
        rows = trainer.train(resume="auto")
    assert [row["time/tokens_per_second"] is not None for row in rows] == [True, True, False, True]


# the last lines


def test_the_error_that_ends_a_rank_is_what_torchrun_shows(tmp_path, monkeypatch, capsys):
    @command
    def main(arguments=None):
        raise TrainingError("rank 0 lost its mind")

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main() == 1
    assert capsys.readouterr().err == "error: rank 0 lost its mind\n"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    shown = str(ChildFailedError("rlvr.train", {0: failure}))
    assert "rank 0 lost its mind" in shown
    assert "Traceback" not in shown


def test_a_file_that_ends_the_process_is_refused_in_words(tmp_path):
    (tmp_path / "check.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"check\.py cannot be imported: SystemExit: 3"):
        registry.find("verifier", f"{tmp_path / 'check.py'}:check")
