"""Disks: how much a run asks for before it starts, and one that fills up while it goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess

import pytest
from resume_helpers import Run, merged, short_tree

from rlvr import GRPOTrainer
from rlvr.errors import ConfigError, TrainingError, command
from rlvr.run.resuming import checkpoint_bytes


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path):
    """Write until the disk takes no more."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


@pytest.mark.alone
def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_the_run_goes_on_later(tmp_path, small_disk):
    over = {"run": {"dir": str(small_disk), "steps": 10**6}, "logging": {"rollouts_gb": 0.0005}, "verifier": "exact"}
    tree = short_tree(tmp_path, checkpoint={"every": 5, "keep": 1}, **over)
    with Run(tree, resume=None) as run:
        run.folder = small_disk / "run"
        assert run.wait(lambda: (run.folder / "checkpoints" / "step-5").exists())
        fill(small_disk / "filler")
        assert run.end() == 1, run.said()
        said = run.said()
    # A checkpoint that was under way fails by itself, beside the run; the run ends by what it writes itself.
    errors = [line for line in said.splitlines() if line.startswith("error: ") and "the checkpoint of step" not in line]
    assert len(errors) == 1, said
    assert f"{run.folder}/" in errors[0]
    assert "No space left on device" in errors[0]
    assert "go on with --resume auto" in errors[0]
    assert "Traceback" not in said
    assert "Logging error" not in said
    assert [path for path in run.folder.rglob("*") if path.name.endswith((".partial", ".tmp"))] == []
    steps = [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    (small_disk / "filler").unlink()
    with Run(merged(tree, {"run": {"steps": len(steps) + 3}})) as run:
        assert run.end() == 0, run.said()


def test_a_full_disk_at_the_lock_names_it_and_leaves_nothing_locked(tmp_path, small_disk):
    from rlvr.run.run_lock import RunLock

    (small_disk / "run").mkdir()
    full = small_disk / "full"
    fill(full)
    with pytest.raises(OSError, match=r"No space left on device.*run\.lock"):
        RunLock(small_disk / "run")
    full.unlink()
    RunLock(small_disk / "run").release()


def test_the_space_for_checkpoints_and_rollouts_is_asked_for_before_the_run(tmp_path, monkeypatch):
    tree = short_tree(tmp_path, verifier="exact", logging={"console": "off"}, checkpoint={"every": 1, "keep": 3})
    usage = shutil.disk_usage(tmp_path)
    with GRPOTrainer(config=tree) as trainer:
        reference = any(stage.keeps_reference for stage in trainer.stages)
        one = checkpoint_bytes(trainer.config, trainer.policy, reference)
        rollouts = 4 * 8 * (1000 + 45 * (512 + 6))  # 4 steps of 8 rollouts, of a prompt and 6 tokens each
        needed = one * (3 + 2 + 1) + rollouts  # kept, newer ones, and one that is being written
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
        with pytest.raises(ConfigError, match=r"6 checkpoints of about \S+ kB .* of rollouts \(logging\.rollouts_gb\)"):
            trainer.train()

    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    with GRPOTrainer(config=tree) as trainer:
        trainer.train(1)


def test_a_full_disk_is_an_error_with_the_file_and_what_to_do(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

    @command
    def main(arguments=None):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/config.yaml")

    assert main() == 1
    output = capsys.readouterr().err
    assert output.startswith("error: runs/a/config.yaml: No space left on device. The disk is full: free some")


def test_a_checkpoint_that_cannot_be_written_at_the_end_is_reported_once(tmp_path, caplog):
    """By the error that ends the run or the call; in the middle of a run by the log. A file is in the place of the
    folder."""
    tree = short_tree(tmp_path, checkpoint={"every": 1}, run={"steps": 3}, verifier="exact", logging={"console": "off"})
    with GRPOTrainer(config=tree) as trainer:
        trainer.train(1)
        folder = trainer.folder.checkpoints
        folder.rename(tmp_path / "aside")
        folder.write_text("mine")
        refused = r"the checkpoint of step 2 could not be written to \S+: .*File exists. The last one is none"
        for save in (lambda: trainer.train(1), trainer.save):
            with pytest.raises(TrainingError, match=refused):
                save()
        assert "could not be written" not in caplog.text
        assert trainer.checkpointer.writer.state == "step 2 could not be written: File exists"
        trainer.checkpointer.after_step(last=False)
        assert caplog.text.count("the checkpoint of step 2 could not be written") == 1
        folder.unlink()
        (tmp_path / "aside").rename(folder)
        trainer.train()
        assert (folder / "step-3").is_dir()
