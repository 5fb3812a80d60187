"""A run that was stopped and resumed equals the run that never was (N8), bit for bit; and what resuming refuses."""

from __future__ import annotations

import shutil
import signal

import pytest

from rlvr import GRPOTrainer, train
from rlvr.errors import CheckpointError, ConfigError, WaitTimeoutError
from small_run import changed, lines, overlaid, task_rows, timeless, weights

OVER = {
    "run": {"steps": 7},
    "algorithm": {"kl": {"coef": {"metric": "kl/ref", "target": 0.01, "initial": 0.2}}, "entropy": 0.01},
    "optim": {"schedule": "cosine", "warmup_steps": 1, "updates_per_batch": 2},
    "stages": [{"kind": "sft", "steps": 3}, {"kind": "grpo", "steps": 4}],
}
"""Imitate, then reinforce with a driven KL penalty against the weights at the start of the second stage."""


@pytest.fixture
def run(make_tree):
    """`run(name, over, resume=...)`: train in a trainer of its own; it is returned closed."""

    def run(name, over=None, resume=None):
        with GRPOTrainer(config=make_tree(overlaid(OVER, over or {}), name)) as trainer:
            trainer.train(resume=resume)
        return trainer

    return run


def assert_same(first, second, from_step=0):
    rows = [timeless(lines(t.folder.path / "metrics.jsonl")) for t in (first, second)]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == list(range(1, len(rows[0]) + 1))
    assert timeless(first.metrics) == timeless(second.metrics) == rows[0]
    assert changed(weights(first), weights(second)) == []
    files = [sorted(path.name for path in (t.folder.path / "rollouts").iterdir()) for t in (first, second)]
    assert files[0] == files[1]


@pytest.fixture
def whole(run):
    return run("whole")


@pytest.mark.gate
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (3,), (4,), (2, 5, 6)], ids=str)
def test_a_run_in_pieces_is_the_run_at_once(run, whole, cuts):
    """Cut in the first stage, between the two, and in the second."""
    for steps in cuts:
        trainer = run("cut", {"run": {"steps": steps}}, resume="auto")
        assert trainer.step == steps
    assert_same(run("cut", resume="auto"), whole)


@pytest.mark.gate
def test_a_run_of_one_stage_goes_on_when_it_gets_more_steps(run, make_tree):
    short = {"stages": [], "optim": {"schedule": "constant"}}
    run("cut", {**short, "run": {"steps": 3}})
    longer = run("cut", {**short, "run": {"steps": 6}}, resume="auto")
    assert_same(longer, run("one", {**short, "run": {"steps": 6}}))


@pytest.mark.gate
def test_an_adapter_and_its_reference_are_resumed(run):
    over = {
        "model": {"adapter": {"r": 2, "dropout": 0.1}},
        "stages": [{"kind": "grpo", "steps": 4}],
        "run": {"steps": 4},
    }
    run("cut", overlaid(over, {"run": {"steps": 2}}))
    assert_same(run("cut", over, resume="auto"), run("adapter", over))


@pytest.mark.gate
def test_what_was_done_past_the_checkpoint_is_done_again(run, whole):
    """As after a kill -9: metrics, rollouts and a torn checkpoint are ahead of the newest whole checkpoint."""
    cut = run("cut", {"run": {"steps": 6}, "checkpoint": {"every": 2, "keep": 9}})
    checkpoints = cut.folder.checkpoints
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4", "step-6"]
    (checkpoints / "step-6" / "tensors-0.safetensors").write_bytes(b"torn")
    with (cut.folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rew')
    again = run("cut", {"checkpoint": {"every": 2, "keep": 9}}, resume="auto")
    assert_same(again, whole)
    assert [row["step"] for row in again.metrics] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.gate
def test_a_torn_checkpoint_never_pushes_out_a_whole_one(run, whole):
    cut = run("cut", {"run": {"steps": 4}, "checkpoint": {"every": 2, "keep": 2}})
    torn = cut.folder.checkpoints / "step-90"
    shutil.copytree(cut.folder.checkpoints / "step-4", torn)
    (torn / "complete.json").unlink()
    again = run("cut", {"checkpoint": {"every": 1, "keep": 1}}, resume="auto")
    assert_same(again, whole)
    assert [path.name for path in again.folder.checkpoints.iterdir()] == ["step-7"]
    assert len(list(again.folder.path.glob("cut-*/checkpoints/step-90/state.json"))) == 1


@pytest.mark.gate
def test_where_all_checkpoints_are_torn_nothing_is_begun_unless_told(run, whole):
    cut = run("cut", {"run": {"steps": 2}, "checkpoint": {"every": 1}})
    (cut.folder.checkpoints / "step-1" / "complete.json").unlink()
    (cut.folder.checkpoints / "step-2" / "state.json").write_text("{")
    before = bytes_of(cut.folder.path)
    for overwrite in (False, True):  # a requeued job may say it: what is damaged is for a person to decide
        with pytest.raises(CheckpointError) as caught:
            run("cut", {"run": {"overwrite": overwrite}}, resume="auto")
        for words in ("step-2 cannot be used: state.json is damaged", "step-1 cannot be used: it was not finished"):
            assert words in str(caught.value)
        assert "run.overwrite=true moves the run aside and starts over" in str(caught.value)
        assert bytes_of(cut.folder.path) == before
    again = run("cut", {"run": {"overwrite": True}})
    assert_same(again, whole)
    old = next(cut.folder.path.parent.glob("cut.old-*"))
    assert bytes_of(old) == before


@pytest.mark.gate
def test_steps_without_a_checkpoint_are_not_lost_unless_told(run, whole, make_tree, capsys):
    cut = run("cut", {"run": {"steps": 2}})
    shutil.rmtree(cut.folder.checkpoints)
    (cut.folder.path / "notes.md").write_text("mine")
    before = bytes_of(cut.folder.path)
    with pytest.raises(ConfigError, match=r"holds 2 steps and no checkpoint .*run\.overwrite=true starts over"):
        run("cut", resume="auto")
    assert bytes_of(cut.folder.path) == before
    over = {"run": {"overwrite": True}, "logging": {"console": "plain"}}
    again = run("cut", over, resume="auto")
    old = next(cut.folder.path.parent.glob("cut.old-*"))
    assert f"held is now {old}" in capsys.readouterr().out
    assert bytes_of(old) == before
    assert_same(again, whole)
    (run("cut", over, resume="auto"))  # goes on where it can
    assert len(list(cut.folder.path.parent.glob("cut.old-*"))) == 1


@pytest.mark.gate
def test_a_run_that_was_killed_before_its_first_step_begins_again(run, whole):
    killed = run("cut", {"run": {"steps": 1}})
    folder = killed.folder.path
    shutil.rmtree(killed.folder.checkpoints)
    shutil.rmtree(folder / "rollouts")
    (folder / "metrics.jsonl").write_text('{"step": 1, "rew')
    (folder / "evaluations.jsonl").write_text('{"step": 0}\n')
    assert_same(run("cut", resume="auto"), whole)
    assert (folder / "evaluations.jsonl").read_text() == ""


def bytes_of(folder):
    """Every file below a folder, but for the lock, which each process writes its name to."""
    files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.mark.gate
def test_a_finished_run_is_left_as_it_is(run, make_tree, tmp_path):
    done = run("done")
    before = {path: path.read_bytes() for path in done.folder.path.rglob("*") if path.is_file()}
    again = run("done", resume="auto")
    assert again.step == 7
    assert changed(weights(done), weights(again)) == []
    assert {path: path.read_bytes() for path in done.folder.path.rglob("*") if path.is_file()} == before
    path = done.folder.path / "config.yaml"
    assert train.main(["--config", str(path), "--resume", "auto"]) == 0
    assert train.main(["--config", str(path), "--resume", str(done.folder.path)]) == 0
    assert train.main(["--config", str(path), "--resume", str(done.folder.checkpoints / "step-7")]) == 0
    assert (done.folder.path / "metrics.jsonl").read_bytes() == before[done.folder.path / "metrics.jsonl"]


@pytest.mark.gate
def test_auto_begins_where_there_is_nothing(run, whole):
    assert_same(run("fresh", resume="auto"), whole)


@pytest.mark.gate
def test_resuming_an_older_checkpoint_moves_what_came_after_it_aside(run, whole):
    cut = run("cut", {"checkpoint": {"every": 1, "keep": 9}, "run": {"steps": 5}})
    folder = cut.folder.path
    for file in ("rollouts/step-x.jsonl", "rollouts/step-9.notes", "evaluations/step-x.json", "checkpoints/step-x"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("mine")
    before = bytes_of(folder)
    again = run("cut", resume=str(cut.folder.checkpoints / "step-2"))
    assert sorted(path.name for path in again.folder.checkpoints.iterdir()) == ["step-2", "step-7", "step-x"]
    aside = bytes_of(next(folder.glob("cut-*")))
    assert {
        path for path in before if path.parts[0] == "checkpoints" and path.parts[1] in ("step-3", "step-4", "step-5")
    } <= {*aside}
    assert [row["step"] for row in lines(next(folder.glob("cut-*")) / "metrics.jsonl")] == [3, 4, 5]
    assert {path: before[path] for path in aside if path in before and path.suffix != ".jsonl"} == {
        path: content for path, content in aside.items() if path.suffix != ".jsonl"
    }
    for file in [*folder.rglob("step-x*"), folder / "rollouts" / "step-9.notes"]:
        assert file.read_text() == "mine"
        file.unlink()
    assert_same(again, whole)


@pytest.mark.gate
def test_going_on_under_another_name(run, whole):
    first = run("first", {"run": {"steps": 4}})
    second = run("second", resume=str(first.folder.path))
    assert [row["step"] for row in second.metrics] == [5, 6, 7]
    assert changed(weights(whole), weights(second)) == []
    assert [row["step"] for row in first.folder.metrics.rows()] == [1, 2, 3, 4]


def test_a_folder_of_another_run_is_not_resumed_into(run):
    first, second = run("first", {"run": {"steps": 2}}), run("second", {"run": {"steps": 3}})
    before = (second.folder.path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"choose another run\.name"):
        run("second", resume=str(first.folder.path))
    assert (second.folder.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("over", "key"),
    [
        ({"optim": {"lr": 0.5}}, "optim.lr: 0.01 -> 0.5"),
        ({"run": {"seed": 9}}, "run.seed: 0 -> 9"),
        ({"rollout": {"group_size": 5}}, "rollout.group_size: 4 -> 5"),
        ({"verifier": "exact"}, "verifier: "),
        ({"algorithm": {"loss": {"clip_low": 0.1}}}, "algorithm.loss.clip_low: 0.2 -> 0.1"),
        ({"stages": [{"kind": "sft", "steps": 3}, {"kind": "grpo", "steps": 5}]}, "stages.1.steps: 4 -> 5"),
    ],
    ids=str,
)
def test_a_changed_configuration_is_refused_by_key(run, over, key):
    cut = run("cut", {"run": {"steps": 2}})
    before = (cut.folder.path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        run("cut", over, resume="auto")
    assert f"  {key}" in str(caught.value)
    assert str(caught.value).count("->") == 1
    assert (cut.folder.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.gate
def test_what_does_not_change_what_is_learned_may_change(run, whole):
    run("cut", {"run": {"steps": 2}})
    free = {
        "checkpoint": {"every": 3},
        "evaluation": {"at_end": False},
        "logging": {"console": "plain"},
        "verification": {"workers": 1},
    }
    again = run("cut", free, resume="auto")
    assert_same(again, whole)
    assert again.folder.path.joinpath("config.yaml").read_text().count("every: 3") == 1


def test_changed_tasks_are_refused(run, tmp_path):
    run("cut", {"run": {"steps": 2}})
    (tmp_path / "tasks.jsonl").write_text('{"id": "t0", "prompt": "7=?", "demonstration": "7"}\n')
    with pytest.raises(CheckpointError, match="made with other tasks"):
        run("cut", resume="auto")


def test_paths_without_a_checkpoint_are_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        run("cut", resume=str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="there is no run or checkpoint"):
        run("cut", resume=str(tmp_path / "none"))
    assert not (tmp_path / "runs" / "cut").exists()


def test_without_resume_a_folder_with_metrics_is_refused(run):
    run("cut", {"run": {"steps": 1}})
    with pytest.raises(ConfigError, match="--resume auto"):
        run("cut")


# stops


def test_a_stop_during_an_evaluation_loses_nothing(make_tree):
    """The evaluation is made up for, in the same trainer and in another one that resumes."""
    over = {"run": {"steps": 4}, "stages": [{"kind": "grpo", "steps": 4}], "evaluation": {"every": 2}}

    def trainer_of(name, *stops):
        left = set(stops)

        def reward(completion, task):
            if task.id.startswith("e") and trainer.step in left:
                left.remove(trainer.step)
                trainer.stop.signal = signal.SIGINT
            return len(set(completion)) / 6

        rows = [{**row, "id": f"e{row['id']}"} for row in task_rows(3)]
        trainer = GRPOTrainer(config=make_tree(overlaid(OVER, over), name), verifier=reward, eval_tasks=rows)
        return trainer

    with trainer_of("whole") as whole:
        whole.train()
    with trainer_of("same", 0, 2, 4) as same:
        for step in (0, 2, 4, 4):
            same.train()
            assert same.step == step
    with trainer_of("cut", 2) as cut:
        cut.train()
        assert cut.step == 2
        assert "eval/greedy" not in lines(cut.folder.path / "metrics.jsonl")[1]
    with trainer_of("cut") as again:
        again.train(resume="auto")
    for other in (same, again):
        assert_same(other, whole)
        assert timeless(other.evaluations) == timeless(whole.evaluations)
        assert timeless(lines(other.folder.path / "evaluations.jsonl")) == timeless(whole.evaluations)


def test_an_evaluation_after_a_stop_runs(make_trainer):
    trainer = make_trainer(eval_tasks=task_rows(2))
    trainer.train(1)
    trainer.stop.signal = signal.SIGINT
    assert trainer.evaluate()["eval/tasks"] == 2


def test_a_collection_that_fails_gives_its_draws_back(make_trainer):
    """The steps before it are saved, and trying again goes on as if nothing had happened."""
    whole, cut = make_trainer({"run": {"steps": 4}}), make_trainer({"run": {"steps": 4}}, "cut")
    whole.train()
    cut.train(1)
    wait = cut.rollouts.collector.wait

    def fail(*arguments):
        cut.rollouts.collector.wait = wait
        raise WaitTimeoutError("waited 1 s for rollouts")

    cut.train(1)
    cut.rollouts.collector.wait = fail
    shutil.rmtree(cut.folder.checkpoints)
    with pytest.raises(WaitTimeoutError):
        cut.train()
    assert [path.name for path in cut.folder.checkpoints.iterdir()] == ["step-2"]
    cut.train()
    assert_same(cut, whole)
