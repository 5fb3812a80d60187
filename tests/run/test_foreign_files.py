"""What rlvr did not write is never removed, moved or written over, whatever the folder is called and holds."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from resume_helpers import Run, make_tree, merged

from rlvr import GRPOTrainer
from rlvr.config.config_loading import load_config
from rlvr.diff.__main__ import main as diff
from rlvr.errors import CheckpointError, ConfigError
from rlvr.evaluate import main as evaluate
from rlvr.replay.__main__ import main as replay
from rlvr.report.folder import read_run
from rlvr.rollout import HFEngine
from rlvr.rollout.vllm.gate import check_released
from rlvr.run import policy_training
from rlvr.run.run_lock import holder_of
from rlvr.train import main as train
from small_run import task_rows

SHORT = {
    "stages": [],
    "run": {"steps": 4},
    "evaluation": {"at_start": False, "at_end": False, "every": 0},
    "verification": {"workers": 1},
    "logging": {"console": "off"},
}
FOREIGN = (
    "notes.md",
    "src/train.py",
    ".git/HEAD",
    "step-x/a",
    "step-7",
    "metrics.tmp",
    "rollouts/notes.txt",
    "rollouts/step-x.jsonl",
    "rollouts/step-000001.tmp",
    "rollouts/step-000002.jsonl.bak",
    "evaluations/step-x.json",
    "checkpoints/mine/weights.bin",
    "checkpoints/step-x/a",
    "checkpoints/step-2.old/a",
    "checkpoints/.step-1.partial/notes.txt",
    "checkpoints/.step-x.partial/notes.txt",
    "profile/notes.txt",
)
"""Files of a user's in a run folder, some of them with names like ours."""


def config(folder, **over):
    return merged(make_tree(folder, "run", **SHORT), over)


def trained(tree, resume=None):
    with GRPOTrainer(config=tree) as trainer:
        trainer.train(resume=resume)
    return trainer


def plant(folder):
    """Write the user's files, each with a content of its own, a link and an empty folder; what is to be found again."""
    contents = {}
    for name in FOREIGN:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{name} is mine\n".encode() + bytes(range(256)))
        contents[path.read_bytes()] = name
    outside = folder.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "state.json").write_bytes(b"outside")
    for link in ("checkpoints/step-3.link", "rollouts/step-000099.jsonl"):
        if not (folder / link).is_symlink():
            (folder / link).symlink_to(outside / "state.json")
    return contents


def found(*folders):
    """The contents of all files below the folders."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path.read_bytes() for path in paths}


@pytest.mark.alone
def test_a_folder_full_of_the_user_s_files_keeps_every_one(tmp_path):
    """Through a start, checkpoints of which one is kept, a resume from an older one, a kill, a resume, and an
    overwrite."""
    folder = tmp_path / "runs" / "run"
    contents = plant(folder)
    (folder / "rollouts" / "step-000099.jsonl").unlink()  # a name that a run would write is refused, see below
    checkpoints = {"every": 1, "keep": 1}
    trained(config(tmp_path, run={"steps": 2}, checkpoint=checkpoints))
    contents |= plant(folder)
    late = folder / "checkpoints" / "step-2" / "model" / "notes.txt"  # in a checkpoint that will be removed
    late.write_bytes(b"in a checkpoint")
    mine = folder / "checkpoints" / "step-90"
    mine.mkdir()
    (mine / "weights.bin").write_bytes(b"in a folder called as a checkpoint")
    contents |= {late.read_bytes(): "late", b"in a folder called as a checkpoint": "step-90"}
    for steps, resume in ((3, "auto"), (4, str(folder / "checkpoints" / "step-3"))):
        trained(config(tmp_path, run={"steps": steps}, checkpoint=checkpoints), resume)
        assert contents.keys() <= found(folder)
    with Run(config(tmp_path, run={"steps": 40}, checkpoint=checkpoints)) as run:
        assert run.wait(lambda: run.lines() >= 7)
        run.kill()
    assert contents.keys() <= found(folder)
    trained(config(tmp_path, run={"steps": 8}, checkpoint=checkpoints), "auto")
    assert contents.keys() <= found(folder)
    for name in FOREIGN:
        if ".partial" not in name:
            assert (folder / name).is_file(), name
    everything = found(folder)
    trained(config(tmp_path, run={"steps": 1, "overwrite": True}))
    (old,) = folder.parent.glob("run.old-*")
    assert everything <= found(old) | {b for b in everything if b.startswith(b"process ")}
    assert (tmp_path / "outside" / "state.json").read_bytes() == b"outside"


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "log.txt",
        "report.html",
        "checkpoints/step-7/weights.bin",
        "rollouts/step-000001.jsonl",
        "base/model.safetensors",
    ],
)
def test_a_folder_with_a_file_that_a_run_would_write_is_refused_by_its_name(tmp_path, name):
    path = tmp_path / "runs" / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("run: {steps: 3}  # mine\n")
    for over in ({}, {"run": {"overwrite": True}}):
        for resume in (None, "auto"):
            with pytest.raises(
                ConfigError, match=r"runs/run holds .*nothing there is touched, choose another run\.name"
            ):
                trained(config(tmp_path, **over), resume)
    assert [p for p in (tmp_path / "runs").rglob("*") if p.is_file()] == [path]
    assert path.read_text() == "run: {steps: 3}  # mine\n"


@pytest.mark.alone
def test_an_empty_or_broken_configuration_of_a_run_is_named_with_its_place_and_the_fix(tmp_path, capsys):
    """By a start, a resume, an overwrite, an evaluation, a report, a replay and a comparison of runs; nothing is
    touched."""
    path = tmp_path / "runs" / "run"
    trained(config(tmp_path, run={"steps": 1}))
    written = (path / "config.yaml").read_text()
    first, _, rest = written.partition("\n")
    faults = {
        "": "config.yaml is empty",
        f"{first}\n\t{rest}": "config.yaml, line 2, column 1: it is not YAML (while scanning for the next token",
    }
    for content, output in faults.items():
        (path / "config.yaml").write_text(content)
        before = found(path)
        for over in ({}, {"run": {"overwrite": True}}):
            for resume in (None, "auto"):
                with pytest.raises(ConfigError) as caught:
                    trained(config(tmp_path, **over), resume)
                assert str(path) in str(caught.value) and output in str(caught.value)
                assert str(caught.value).endswith(f"go on there from the newest checkpoint with --resume {path}")
        for command, more in (
            (train, ("--config", str(path / "config.yaml"))),
            (evaluate, ("--model", str(path))),
            (replay, (str(path),)),
            (diff, (str(path), str(path))),
        ):
            assert command(more) == 2
            *startup, line = capsys.readouterr().err.splitlines()
            phases = r" +\d+\.\d s  (loading torch|reading|comparing) "
            assert len(startup) <= 1 and all(re.match(phases, text) for text in startup)
            assert output in line and "correct it, or restore the file from a copy" in line
            assert ("--config FILE" in line) == (command is evaluate)
        assert any(output in note for note in read_run(path).notes)
        assert found(path) == before
    again = trained(config(tmp_path, run={"name": "again", "steps": 2}), str(path))  # as the message says
    assert again.step == 2


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_file_of_the_user_s_that_is_called_as_the_lock_is_refused_and_kept(tmp_path, kind):
    """A link too: what it leads to is not emptied, neither at the start nor at the end."""
    lock, thesis = tmp_path / "runs" / "run" / "run.lock", tmp_path / "thesis.txt"
    lock.parent.mkdir(parents=True)
    thesis.write_text("process of writing a thesis\n")
    if kind == "file":
        lock.write_text("process of writing a thesis\n")
    elif kind == "link":
        lock.symlink_to(thesis)
    else:
        lock.mkdir()
    with pytest.raises(ConfigError, match=r"run/run\.lock is not a lock that rlvr wrote.*choose another run\.name"):
        trained(config(tmp_path))
    assert thesis.read_text() == "process of writing a thesis\n"
    assert lock.is_dir() if kind == "folder" else lock.read_text() == thesis.read_text()
    assert [path.name for path in lock.parent.iterdir()] == ["run.lock"]


@pytest.mark.gate
def test_saving_before_training_takes_the_folder_as_training_does(tmp_path):
    """A run that is there is neither written to nor thinned out, and a folder of the user's is not touched."""
    checkpoints = {"every": 1, "keep": 2}
    trained(config(tmp_path, run={"steps": 3}, checkpoint=checkpoints))
    folder = tmp_path / "runs" / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}
    fresh = config(tmp_path, checkpoint=checkpoints)
    with GRPOTrainer(config=fresh) as trainer, pytest.raises(ConfigError, match="already holds a run"):
        trainer.save()
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"} == before
    mine = tmp_path / "runs" / "mine"
    mine.mkdir()
    (mine / "config.yaml").write_text("a: 1  # mine\n")
    (mine / "metrics.jsonl").write_text('{"step": 9}\n')
    with GRPOTrainer(config=config(tmp_path, run={"name": "mine"})) as trainer:
        for write in (trainer.save, lambda: trainer.load(folder / "checkpoints" / "step-3")):
            with pytest.raises(ConfigError, match=r"mine holds config\.yaml"):
                write()
    assert sorted(path.name for path in mine.iterdir()) == ["config.yaml", "metrics.jsonl"]
    assert (mine / "config.yaml").read_text() == "a: 1  # mine\n"
    with GRPOTrainer(config=config(tmp_path, run={"name": "new", "steps": 1})) as trainer:
        assert trainer.save().name == "step-0"
        assert holder_of(trainer.folder.path / "run.lock") is not None
        trainer.train()
        assert trainer.step == 1


@pytest.fixture
def release_first(monkeypatch):
    """The rule of the vLLM engines for the engine `hf`: weights are released before they become another version."""
    released = {}  # engine -> whether its weights were released since the last publish

    def publish(engine, version, weights):
        check_released(released.get(engine, True), engine.version, version)
        released[engine] = False
        return take(engine, version, weights)

    take = HFEngine.publish
    monkeypatch.setattr(HFEngine, "publish", publish)
    monkeypatch.setattr(HFEngine, "release", lambda engine: released.update({engine: True}))


@pytest.mark.gate
def test_training_goes_on_from_a_checkpoint_that_was_loaded(tmp_path, release_first):
    trained(config(tmp_path, run={"steps": 3}, checkpoint={"every": 1, "keep": 3}))
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    with GRPOTrainer(config=config(tmp_path)) as trainer:
        trainer.evaluate(task_rows(1))  # the engine has weights before the checkpoint's come
        trainer.load(checkpoints / "step-2")
        assert trainer.step == 2
        trainer.train()
        assert [row["step"] for row in trainer.metrics] == [1, 2, 3, 4]
        trainer.load(checkpoints / "step-2")  # after steps
        trainer.train()
        assert [row["step"] for row in trainer.metrics] == [1, 2, 3, 4]
        with pytest.raises(CheckpointError, match="nowhere"):
            trainer.load(tmp_path / "nowhere")


@pytest.mark.gate
def test_a_run_that_is_under_way_is_never_moved_aside(tmp_path):
    """Also not where it is in a folder of the run that gives way."""
    trained(config(tmp_path, run={"steps": 1}))
    inner = merged(config(tmp_path), {"run": {"name": "run/inner", "steps": 9}})
    with GRPOTrainer(config=inner) as trainer:
        trainer.train(1)
        with pytest.raises(ConfigError, match=rf"run/inner is in use by process {os.getpid()}"):
            trained(config(tmp_path, run={"overwrite": True}))
        trainer.train(1)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


@pytest.mark.slow
def test_runs_that_gave_way_pile_up_in_order_beside_a_linked_folder(tmp_path):
    """Within one second too; the new run is on the disk that the link leads to."""
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "disk" / "real", target_is_directory=True)
    for steps in (1, 2, 3):
        trained(config(tmp_path, run={"steps": steps, "overwrite": True}))
    old = sorted(path for path in (tmp_path / "disk").iterdir() if ".old-" in path.name)
    assert [(path / "metrics.jsonl").read_bytes().count(b"\n") for path in old] == [1, 2]
    assert (tmp_path / "disk" / "real" / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert (tmp_path / "runs" / "run").is_symlink()


@pytest.mark.gate
def test_comments_in_the_configuration_of_a_run_are_kept(tmp_path):
    trainer = trained(config(tmp_path, run={"steps": 1}))
    path = trainer.folder.path / "config.yaml"
    path.write_text(f"# mine\n{path.read_text()}")
    trained(config(tmp_path, run={"steps": 2}), "auto")
    (old,) = trainer.folder.path.glob("config.yaml.old-*")
    assert old.read_text().startswith("# mine\n")


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "/tmp/x", "a/../..", "a/./b", "a//b", "a/", "../../escape", "a\nb", "a\x07b", "\x00"]
)
def test_names_that_are_no_folder_below_the_run_folders_are_refused(name):
    with pytest.raises(ConfigError, match=r"run\.name: .*give a name such as run-1") as caught:
        load_config({"run": {"name": name}})
    assert all(line.isprintable() for line in str(caught.value).splitlines())


@pytest.mark.parametrize("name", ["run-1", "group/run 1", "läufe", ".hidden", "a..b", "x.old"])
def test_names_of_folders_below_the_run_folders_are_taken(name):
    assert load_config({"run": {"name": name}}).run.name == name


@pytest.mark.parametrize("folder", ["", "a\nb"])
def test_a_run_dir_that_is_no_path_is_refused(folder):
    with pytest.raises(ConfigError, match=r"run\.dir: .*give the path of a folder"):
        load_config({"run": {"dir": folder}})


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["verifier", "tasks", "model"])
def test_a_run_with_files_that_the_new_one_needs_is_not_moved_aside(tmp_path, kind):
    tree = config(tmp_path, run={"steps": 1}, checkpoint={"every": 1})
    folder = trained(tree).folder.path
    if kind == "verifier":
        (folder / "mine.py").write_text("def good(completion, answer):\n    return 1.0\n")
        over, named = {"verifier": f"{folder}/mine.py:good"}, "mine.py"
    elif kind == "tasks":
        os.symlink(tree["data"]["train"], folder / "tasks.jsonl")
        over, named = {"data": {"train": {"path": str(folder / "tasks.jsonl")}}}, "tasks.jsonl"
    else:
        (tmp_path / "best").symlink_to(folder / "checkpoints" / "step-1" / "model")
        over, named = {"model": {"path": str(tmp_path / "best"), "scratch": None}}, "best"
    before = found(folder)
    with pytest.raises(ConfigError, match=rf"run\.overwrite: .*{named} is in the run folder that would be moved"):
        trained(merged(config(tmp_path, run={"steps": 1, "overwrite": True}), over))
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert {text for text in before if not text.startswith(b"process ")} <= found(folder)


@pytest.mark.slow
def test_a_lower_bound_on_rollouts_removes_none_of_those_recorded_before(tmp_path, capsys):
    """Neither in the resume that lowers it nor in the one after; nor those of a version that had no bound."""
    checkpoints = {"every": 1, "keep": 1}

    def steps(run, up_to, gigabytes, resume="auto"):
        over = {"run": {"name": run, "steps": up_to}, "logging": {"rollouts_gb": gigabytes, "console": "plain"}}
        trainer = trained(config(tmp_path, checkpoint=checkpoints, **over), resume)
        return [int(path.stem[5:]) for path in sorted((trainer.folder.path / "rollouts").glob("*.jsonl"))]

    assert steps("run", 3, 2.0, None) == [1, 2, 3]
    assert "less than before" not in capsys.readouterr().out
    assert steps("run", 5, 1e-9) == [1, 2, 3, 5]
    assert "stay: logging.rollouts_gb=1e-09 is less than before" in " ".join(capsys.readouterr().out.split())
    assert steps("run", 6, 1e-9) == [1, 2, 3, 6]
    assert "less than before" not in capsys.readouterr().out
    assert steps("other", 4, 1e-9, None) == [4]


@pytest.mark.parametrize(
    ("over", "why"), [({"name": "x" * 300}, "File name too long"), ({"dir": "file"}, "Not a directory")]
)
def test_a_run_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path, over, why):
    (tmp_path / "file").write_text("mine")
    tree = config(tmp_path, run={**over, **({"dir": str(tmp_path / "file")} if "dir" in over else {})})
    with pytest.raises(ConfigError, match=rf"the run folder .* cannot be used: {why}.*Choose another run\.dir"):
        trained(tree)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_that_may_not_be_written_to_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    above = tmp_path / "shared"
    above.mkdir()
    # Whoever runs the tests may be root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda place, how: Path(place) != above)
    monkeypatch.setattr(policy_training.PolicyTraining, "__init__", lambda *_: pytest.fail("a model is loaded"))
    with pytest.raises(ConfigError, match=r"the run folder .*a/b.* cannot be used: Permission denied\."):
        GRPOTrainer(config=config(tmp_path, run={"dir": str(above / "a/b")}))
    assert not list(above.iterdir())
