"""What else may befall a run: signals, full disks, edited data, bad numbers, dead verifiers, a second run, a clock that
jumps."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from resume_helpers import Run, assert_same, make_tree, merged, rows, timeless

from rlvr import GRPOTrainer
from rlvr.core.waits import Wait, finished
from rlvr.distributed.checkpoint import best
from rlvr.errors import CheckpointError, ConfigError, TrainingError, WaitTimeoutError
from rlvr.monitor.trackers import MetricsFile
from rlvr.run import checkpointing as saved_state
from rlvr.run import resuming
from rlvr.run.resuming import checkpoint_bytes
from rlvr.run.run_lock import RunLock

SHORT = {
    "stages": [],
    "run": {"steps": 4},
    "evaluation": {"at_start": False, "at_end": False, "every": 0},
    "logging": {"console": "off"},
}


def short(folder, name, pause=0.0, **over):
    return merged(make_tree(folder, name, pause, **SHORT), over)


def trained(tree, resume=None, steps=None, **parts):
    """A trainer that was closed after training."""
    with GRPOTrainer(config=tree, **parts) as trainer:
        trainer.train(steps, resume=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a short run that nothing befell."""
    return trained(short(tmp_path_factory.mktemp("whole"), "whole")).folder.path


# signals


@pytest.mark.gate
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, id="INT"), pytest.param(signal.SIGTERM, id="TERM", marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_with_a_checkpoint_within_30_seconds(tmp_path, whole, number):
    """While verdicts are being waited for that would take much longer."""
    tree = short(tmp_path, "run", pause=600.0, verification={"time_limit": 900})
    with Run(tree) as run:
        assert run.wait(lambda: run.marked("verifying"))
        began = time.monotonic()
        run.signal(number)
        assert run.end(30) == 128 + number, run.said()
        assert time.monotonic() - began < 30


@pytest.mark.gate
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, whole):
    tree = short(tmp_path, "run", pause=0.02, checkpoint={"every": 0})
    with Run(tree) as run:
        assert run.wait(lambda: run.lines() == 2)
        run.signal(signal.SIGTERM)
        assert run.end(30) == 143, run.said()
        assert (run.folder / "checkpoints" / f"step-{run.lines()}" / "complete.json").exists()
    with Run(tree) as run:
        assert run.end() == 0, run.said()
    assert_same(run.folder, whole)


@pytest.mark.gate
def test_a_second_signal_stops_at_once(tmp_path):
    tree = short(tmp_path, "run", pause=600.0, verification={"time_limit": 900})
    with Run(tree) as run:
        assert run.wait(lambda: run.marked("verifying"))
        run.signal(signal.SIGINT)
        run.signal(signal.SIGTERM)
        began = time.monotonic()
        assert run.end(20) in (130, 143), run.said()
        assert time.monotonic() - began < 10


@pytest.mark.gate
def test_sigusr1_has_the_run_say_what_it_is_doing(tmp_path, whole):
    tree = short(tmp_path, "run", pause=0.05)
    with Run(tree) as run:
        assert run.wait(lambda: run.lines() == 2 and run.marked("verifying") > 18)
        run.signal(signal.SIGUSR1)
        assert run.wait(lambda: "last step: " in run.said())
        assert run.end() == 0
    said = run.said()
    assert re.search(r"run \S+/run, process \d+, rank 0 of 1\nstep: [23] done of 4; stage grpo: [23] of 4", said)
    assert re.search(r"phase: (rollout|verify|score|update|publish|between phases)", said)
    assert re.search(r"verifier processes: [1-9]", said)
    assert "\ncheckpoint: " in said
    assert "last step: step" in said
    assert_same(run.folder, whole)


@pytest.mark.gate
def test_the_status_names_what_is_waited_for(tmp_path):
    tree = short(tmp_path, "run", pause=600.0, verification={"time_limit": 900})
    with Run(tree) as run:
        assert run.wait(lambda: run.marked("verifying"))
        run.signal(signal.SIGUSR1)
        assert run.wait(lambda: "last step: " in run.said())
        assert re.search(r"waits for: rollouts \(2 of 2 groups open\) for \d+ s \(deadline in \d+ s\)", run.said())
        assert "phase: rollout" in run.said()


# waits


def test_a_wait_warns_at_half_and_leaves_all_stacks_at_its_end(caplog):
    held = threading.Event()
    thread = threading.Thread(target=held.wait, args=(30,), name="a-thread-that-hangs")
    thread.start()
    with caplog.at_level(logging.WARNING), pytest.raises(WaitTimeoutError, match=r"waited \d s for a letter"):
        finished(Future(), "a letter", time.monotonic() + 0.6)
    held.set()
    thread.join()
    first, last = [record.getMessage() for record in caplog.records]
    assert re.match(r"still waiting for a letter for \d s \(deadline in \d s\)", first)
    assert "a-thread-that-hangs" in last
    assert "threading.py" in last
    assert Wait.under_way == {}


def test_the_stacks_of_a_wait_that_failed_are_in_the_run_folder(tmp_path):
    tree = short(tmp_path, "run", pause=30.0, rollout={"deadline": 1.0}, verification={"time_limit": 60})
    with pytest.raises(WaitTimeoutError, match="rollouts"):
        trained(tree)
    output = (tmp_path / "runs" / "run" / "log.txt").read_text()
    assert "still waiting for rollouts (2 of 2 groups open)" in output
    assert "thread rlvr-collector:" in output
    assert "thread MainThread:" in output


@pytest.mark.slow
def test_a_clock_that_jumps_harms_nothing(tmp_path, whole, monkeypatch):
    """time.time goes back and forth by days at every look; waits and durations do not use it."""
    real, looks = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (next(looks) % 5 - 2) * 100_000.0)
    done = trained(short(tmp_path, "run"), steps=2)
    assert_same(trained(short(tmp_path, "run"), resume="auto").folder.path, whole)
    assert all(0 <= row["time/step"] < 60 for row in done.metrics)
    future: Future[None] = Future()
    threading.Timer(0.4, future.set_result, [None]).start()
    assert finished(future, "something", time.monotonic() + 20)
    with pytest.raises(WaitTimeoutError):
        finished(Future(), "nothing", time.monotonic() + 0.2)


# one run in a folder


@pytest.mark.gate
def test_a_second_run_in_the_folder_is_refused_by_the_holder_s_name(tmp_path):
    tree = short(tmp_path, "run", pause=600.0, verification={"time_limit": 900})
    with Run(tree) as run:
        assert run.wait(lambda: run.marked("verifying"))
        before = sorted(run.folder.rglob("*"))
        for resume in (None, "auto"):
            over = {"run": {"overwrite": True}} if resume is None else {}
            with pytest.raises(
                ConfigError, match=rf"in use by process {run.process.pid} on {os.uname().nodename}, since"
            ):
                trained(merged(tree, over), resume)
        assert sorted(run.folder.rglob("*")) == before
        run.kill()
    again = short(tmp_path, "run", pause=600.0)
    again["verifier"] = "exact"
    trained(merged(again, {"run": {"overwrite": True}}))  # a killed process holds nothing


def test_a_trainer_that_was_not_closed_gives_way_to_the_next_of_its_process(tmp_path):
    first = RunLock(tmp_path / "run")
    second = RunLock(tmp_path / "run")
    first.release()  # closed late: the second one keeps the folder
    assert f"process {os.getpid()}" in (tmp_path / "run" / "run.lock").read_text()
    second.release()
    assert (tmp_path / "run" / "run.lock").read_text() == ""


# data


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_edited_data_is_refused_unless_told(tmp_path, kind):
    """A word of one task, with the same ids and numbers of tasks."""
    tree = short(tmp_path, "run", evaluation={"every": 2})
    trained(tree, steps=1)
    folder = tmp_path / "runs" / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    file = tmp_path / "data" / f"{kind}.jsonl"
    file.write_text(file.read_text().replace("1=?", "1==?"))
    with pytest.raises(CheckpointError, match=r"other (evaluation )?tasks.*accept_changed_data=true"):
        trained(tree, "auto")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    done = trained(merged(tree, {"checkpoint": {"accept_changed_data": True}}), "auto")
    assert done.step == 4
    assert done.metrics[-1]["run/epoch"] == (2 if kind == "train" else 1)
    trained(tree, "auto")  # the checkpoint is of the data as it is now


@pytest.mark.gate
def test_fewer_tasks_may_be_gone_on_with_when_told(tmp_path):
    """Also with draws ahead, of tasks that are gone."""
    tree = short(tmp_path, "run", rollout={"staleness": 2}, run={"steps": 6})
    trained(tree, steps=2)
    (tmp_path / "data" / "train.jsonl").write_text(rows("t", 2))
    done = trained(merged(tree, {"checkpoint": {"accept_changed_data": True}}), "auto")
    assert done.step == 6
    assert {rollout.task.id for rollout in done.batch.rollouts} <= {"t0", "t1"}


# bad numbers


def test_a_loss_that_is_not_a_number_costs_its_step_and_stops_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    tree = short(tmp_path, "run", run={"steps": 9, "max_nonfinite": 2}, optim={"updates_per_batch": 1})
    with GRPOTrainer(config=tree) as trainer:
        trainer.train(2)
        before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
        loss = trainer.stages[0].objective().components[0].loss
        monkeypatch.setattr(type(loss), "__call__", lambda self, tokens, over: objective_term(tokens))
        with pytest.raises(TrainingError, match=r"2 steps in a row; stopped with the checkpoint \S+step-4"):
            trainer.train()
        assert [row["skipped/nonfinite"] for row in trainer.metrics] == [0, 0, 1, 1]
        assert all(p.equal(before[name]) for name, p in trainer.policy.model.named_parameters())
    assert (trainer.folder.checkpoints / "step-4" / "complete.json").exists()


def objective_term(tokens):
    from rlvr.losses import LossTerm

    return LossTerm(tokens.logprobs.sum() * float("nan"))


def test_a_gradient_that_is_not_a_number_costs_its_step(tmp_path):
    tree = short(tmp_path, "run", optim={"updates_per_batch": 1})
    with GRPOTrainer(config=tree) as trainer:
        trainer.train(1)
        before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
        moments = [s["exp_avg"].clone() for s in trainer.training.backend.optimizer.state.values()]
        parameter = next(iter(trainer.policy.trainable().values()))
        hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
        trainer.train(1)
        hook.remove()
        assert trainer.metrics[-1]["skipped/nonfinite"] == 1
        assert all(p.equal(before[name]) for name, p in trainer.policy.model.named_parameters())
        now = [s["exp_avg"] for s in trainer.training.backend.optimizer.state.values()]
        assert all(a.equal(b) for a, b in zip(now, moments, strict=True))
        trainer.train()
        assert [row["skipped/nonfinite"] for row in trainer.metrics] == [0, 1, 0, 0]
        assert all(bool(p.isfinite().all()) for p in trainer.policy.model.parameters())


def test_a_reward_that_is_not_a_number_is_undecided(tmp_path):
    """It neither counts nor spreads."""
    calls = iter(range(10**6))

    def reward(completion):
        return float("nan") if next(calls) % 3 == 0 else len(set(completion)) / 9

    trainer = trained(short(tmp_path, "run"), verifier=reward)
    assert trainer.step == 4
    assert all(row["skipped/nonfinite"] == 0 for row in trainer.metrics)
    assert all(bool(p.isfinite().all()) for p in trainer.policy.model.parameters())
    assert all(row["reward/mean"] is None or 0 <= row["reward/mean"] <= 1 for row in trainer.metrics)


# dead verifiers


def children(process: int) -> list[int]:
    """All descendants of a process."""
    result = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            result += [child, *children(child)]
    return result


@pytest.mark.gate
def test_a_verifier_pool_that_is_killed_costs_no_step(tmp_path, whole):
    """Server, template and workers, twice, in the middle of verdicts: they are started again and the verdicts are the
    same."""
    tree = short(tmp_path, "run", pause=0.05)
    with Run(tree) as run:
        for count in (5, 14):
            assert run.wait(lambda count=count: run.marked("verifying") >= count)
            killed = children(run.process.pid)
            assert len(killed) >= 2
            for process in killed:
                os.kill(process, signal.SIGKILL)
        assert run.end() == 0, run.said()
        assert run.lines() == 4
    rows = timeless(run.folder / "metrics.jsonl")
    assert rows[-1]["verdict/error"] == 0  # a verdict that lost its process twice is undecided, and no other
    assert all(row["verdict/error"] < 1 for row in rows)
    if all(row["verdict/error"] == 0 for row in rows):
        assert_same(run.folder, whole)


# full disks


@pytest.mark.gate
def test_a_full_disk_while_saving_costs_no_step_and_the_last_good_checkpoint_stands(tmp_path, whole):
    """A limit on the size of files (RLIMIT_FSIZE) stands in for the disk: the tensors no longer fit, the logs do."""
    tree = short(tmp_path, "run", checkpoint={"every": 1, "keep": 9})
    with Run(merged(tree, {"run": {"steps": 2}}), resume=None) as run:
        assert run.end() == 0, run.said()
    size = (run.folder / "checkpoints" / "step-2" / "tensors-0.safetensors").stat().st_size
    with Run(tree, limit=size // 2) as run:
        assert run.end() == 1, run.said()
        assert run.lines() == 4
        said = run.said()
    log = (run.folder / "log.txt").read_text()  # the console is off, and shows the error alone
    assert re.search(r"the checkpoint of step 3 could not be written to \S+/checkpoints: .*File too large", log), log
    assert (log + said).count(
        "the checkpoint of step 4 could not be written"
    ) == 1  # that of the last step ends the run
    assert re.search(
        r"error: the checkpoint of step 4 could not be written to \S+/checkpoints: .* The last one is \S+step-2", said
    )
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert "could not be written" in (run.folder / "log.txt").read_text()
    with Run(tree) as run:
        assert run.end() == 0, run.said()
    assert_same(run.folder, whole)


@pytest.mark.gate
def test_a_run_is_refused_where_its_checkpoints_do_not_fit(tmp_path, monkeypatch):
    tree = short(tmp_path, "run")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"has 1.0 kB of free space, and the run takes up to .* checkpoints of about"):
        trained(tree)
    monkeypatch.undo()
    trained(tree)  # nothing is in the way afterwards
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    trained(tree, resume="auto")  # it is finished and needs no more


@pytest.mark.gate
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize("adapter", [None, {"r": 2}], ids=["whole", "lora"])
def test_the_estimate_of_a_checkpoint_is_near_its_size(tmp_path, adapter, optimizer):
    over = {"hidden_size": 128, "intermediate_size": 512, "layers": 2}
    tree = short(tmp_path, "run", run={"steps": 1}, optim={"optimizer": optimizer})
    tree["model"]["scratch"] |= over
    tree["model"]["adapter"] = adapter
    if optimizer == "sgd":
        tree["optim"]["optimizer"] = {"name": "sgd", "momentum": 0.9}
    trainer = trained(tree)
    path = trainer.folder.checkpoints / "step-1"
    real = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    reference = any(stage.keeps_reference for stage in trainer.stages)
    estimate = checkpoint_bytes(trainer.config, trainer.policy, reference)
    assert 0.7 < estimate / real < 1.5 or abs(real - estimate) < 100_000


def test_a_line_of_metrics_that_cannot_be_written_stops_the_run_in_words(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"No space left on device.*--resume auto"):
        MetricsFile(path).append({"step": 1})


# other checkpoints


@pytest.mark.gate
def test_a_checkpoint_of_another_model_is_refused_by_what_differs_and_nothing_is_touched(tmp_path):
    """The configuration is the same: the models were given as objects."""
    tree = short(tmp_path, "run")
    trained(tree, steps=2)
    folder = tmp_path / "runs" / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with GRPOTrainer(config=tree) as trainer:
        layer = trainer.policy.causal_lm.model.layers[0].mlp
        layer.up_proj = torch.nn.Linear(32, 99, bias=False)
        trainer.enter(0)
        with pytest.raises(CheckpointError, match=r"of another model: .*up_proj.*\[64, 32\].*\[99, 32\]"):
            trainer.train(resume="auto")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.gate
def test_a_checkpoint_that_other_versions_wrote_is_used_and_that_is_said(tmp_path, caplog, monkeypatch):
    tree = short(tmp_path, "run")
    trained(tree, steps=2)
    now = resuming.versions()
    monkeypatch.setattr(resuming, "versions", lambda: {**now, "torch": "99.0"})
    assert trained(tree, "auto").step == 4
    assert f"it was made with torch {now['torch']} and goes on with 99.0" in caplog.text


@pytest.mark.gate
def test_metrics_that_were_lost_are_said(tmp_path, caplog):
    tree = short(tmp_path, "run")
    path = trained(tree, steps=3).folder.metrics.path
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert trained(tree, "auto").step == 4
    assert "metrics.jsonl lacks 1 of the steps before the checkpoint" in caplog.text


# by the clock


class Clock:
    """In the place of the module `time`: goes on when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


def test_checkpoints_by_the_clock_come_when_due_and_hold_the_steps_up_for_3_percent_at_most(tmp_path, monkeypatch):
    """A step takes 10 s and a checkpoint 3 s, which is 3 % of 100 s; due are 30 s. All those so far count, but for the
    first, whose cost is not known before."""
    clock, saved, shares = Clock(), [], []
    monkeypatch.setattr(saved_state, "time", clock)
    tree = short(tmp_path, "run", run={"steps": 25}, checkpoint={"every": 0, "minutes": 0.5, "background": False})
    with GRPOTrainer(config=tree, verifier=lambda completion: len(completion) / 9) as trainer:
        after_step, write = trainer.checkpointer.after_step, trainer.checkpointer.writer.write

        def later(*arguments, **options):
            clock.now += 10.0
            after_step(*arguments, **options)

        def slow(contents, *more):
            clock.now += 3.0
            saved.append(contents.step)
            shares.append(3.0 * len(saved) / (clock.now - 1000.0))
            write(contents, *more)

        trainer.checkpointer.after_step, trainer.checkpointer.writer.write = later, slow
        trainer.train()
    assert saved == [3, 20, 25]
    assert shares[1] <= 0.03 < shares[0]
    assert sorted(path.name for path in trainer.folder.checkpoints.iterdir()) == ["step-20", "step-25"]


# the best


def test_the_best_step_is_saved_and_kept(tmp_path):
    """By a metric that only evaluated steps have; whatever `every` says."""
    tree = short(tmp_path, "run", run={"steps": 8}, evaluation={"every": 2})
    tree["checkpoint"] = {"every": 0, "keep": 1, "best": {"metric": "eval/greedy"}}
    worth = {2: 0.3, 4: 0.9, 6: 0.4, 8: 0.9}
    with GRPOTrainer(config=tree, verifier=lambda completion: len(completion) / 9) as trainer:
        real = trainer.evaluator.evaluate
        trainer.evaluator.evaluate = lambda *a: {**real(*a), "eval/greedy": worth[trainer.step]}
        trainer.train()
    names = sorted(path.name for path in trainer.folder.checkpoints.iterdir())
    assert names == ["step-4", "step-8"]
    manifest = json.loads((trainer.folder.checkpoints / "step-4" / "complete.json").read_text())
    assert manifest["metrics"]["eval/greedy"] == 0.9


def test_a_step_does_not_wait_for_a_checkpoint_to_tell_whether_it_is_the_best(tmp_path, monkeypatch):
    """The score of the one that is being written counts as well as those on disk."""
    tree = short(
        tmp_path, "run", run={"steps": 4}, checkpoint={"every": 0, "minutes": 0, "best": {"metric": "grad_norm"}}
    )
    with GRPOTrainer(config=tree, verifier=lambda completion: len(completion) / 9) as trainer:
        trainer.train(1)
        checkpointer, folder = trainer.checkpointer, trainer.folder.checkpoints
        written = threading.Event()
        real = checkpointer.writer._write
        checkpointer.writer._write = lambda contents: written.wait(60) and real(contents)
        monkeypatch.setattr(checkpointer.writer, "wait", lambda: pytest.fail("a step waited"))
        on_disk = best(folder, "grad_norm", "max")[1]
        answers = []
        for value, save in ((on_disk - 1, False), (on_disk + 2, True), (on_disk + 1, False), (on_disk + 3, False)):
            trainer.metrics[-1] = {**trainer.metrics[-1], "grad_norm": value}
            answers.append(checkpointer._is_best())
            if save:
                monkeypatch.setattr(
                    checkpointer.writer, "open", lambda step, *_: (folder / f".step-{step}.partial").mkdir() or True
                )
                checkpointer.save(wait=False)
        assert answers == [False, True, False, True]
        assert checkpointer.writer.busy
        monkeypatch.undo()
        written.set()


def test_an_unknown_metric_to_keep_the_best_of_is_refused_by_name(tmp_path):
    tree = short(tmp_path, "run")
    tree["checkpoint"] = {"best": {"metric": "grad_nrom"}}
    with pytest.raises(ConfigError, match=r"no metric is called 'grad_nrom'; did you mean 'grad_norm'"):
        GRPOTrainer(config=tree)
