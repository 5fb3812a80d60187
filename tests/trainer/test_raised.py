"""A verifier or reward that raises: on every answer it ends the run with the user's traceback, on some it is said
once."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import yaml

from rlvr.errors import ConfigError, TrainingError, UserCodeError
from rlvr.evaluate import main as evaluate
from rlvr.monitor.health import findings_of
from rlvr.train import main
from rlvr.trainer import GRPOTrainer
from small_run import lines

FAULTY = """
import os

from rlvr import Verdict, Verifier

def counts(completion, answer):
    return lenght(completion)  # a misspelt name

def columns(prompts, completions, **columns):
    return [lenght(c) for c in completions]

async def waits(completion):
    return lenght(completion)

def text(completion):
    return "1.0"

def whole(batch):
    return [lenght(r.text) for r in batch.rollouts]

def short(batch):
    return [1.0]

def sometimes(completion):
    if completion[:1] in tuple("02468="):
        raise KeyError("even")
    return float(len(completion) > 3)

def never(completion):
    return 0.0

def always(completion):
    return 1.0

def service(completion):
    if os.environ.get("RLVR_TEST_SERVICE") == "down":
        raise ConnectionError("service down")
    return 1.0

def leaves(completion):
    exec("import sys; sys.exit(0)")  # as an answer that is run may do

def leaves_whole(batch):
    raise SystemExit(4)

class Made(Verifier):
    def __init__(self):
        self.judge = lenght("a service")

    def verify(self, task, completion):
        return 1.0

class Checks(Verifier):
    def verify(self, task, completion):
        return lenght(completion)

class Quick(Verifier):
    def quick(self, task, completion):
        return lenght(completion)

    def verify(self, task, completion):
        return 1.0
"""
EVERY = ["counts", "columns", "waits", "Checks", "Quick"]


@pytest.fixture
def faulty(tmp_path):
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    return file


def ends(trainer) -> str:
    """The text of the TrainingError that ends the run."""
    before = [p.detach().clone() for p in trainer.policy.model.parameters()]
    with trainer, pytest.raises(TrainingError) as caught:
        trainer.train()
    assert all(a.equal(b) for a, b in zip(before, trainer.policy.model.parameters(), strict=True))
    assert not list(trainer.folder.path.glob("checkpoints/*"))
    assert not trainer.folder.metrics.path.exists()
    return str(caught.value)


def users_lines(said: str, file) -> None:
    """`said` has the user's file, line and exception, and no line of ours."""
    assert f'File "{file}", line ' in said
    assert "lenght(" in said
    assert said.endswith("NameError: name 'lenght' is not defined")
    assert "src/rlvr" not in said


@pytest.mark.parametrize("name", EVERY)
def test_a_verifier_that_always_raises_ends_the_run_with_its_traceback(make_tree, faulty, name):
    output = ends(GRPOTrainer(config=make_tree({"verifier": f"{faulty}:{name}"})))
    users_lines(output, faulty)
    assert (
        "failed on every answer that it was asked for (8). Nothing was trained: correct it and start again." in output
    )


def test_so_does_one_that_never_returns_a_number(make_tree, faulty):
    output = ends(GRPOTrainer(config=make_tree({"verifier": f"{faulty}:text"})))
    assert "text returned str, not a number" in output


def test_so_do_reward_terms_of_one_answer_and_of_the_batch(make_tree, faulty):
    output = ends(GRPOTrainer(config=make_tree({"rewards": ["verdict", f"{faulty}:counts"]}, "one")))
    users_lines(output, faulty)
    assert "the reward 'counts' failed on every answer" in output
    output = ends(GRPOTrainer(config=make_tree({"rewards": ["verdict", f"{faulty}:whole"]}, "batch")))
    users_lines(output, faulty)


@pytest.mark.parametrize("dynamic_sampling", [None, {"attempts": 2}])
@pytest.mark.parametrize("name", ["leaves", "leaves_whole"])
def test_a_reward_that_ends_python_ends_no_run_in_silence(make_tree, faulty, name, dynamic_sampling, caplog):
    """SystemExit is the trouble of the user's code as any exception is; with weight 0 it is a warning."""
    rollout = {"dynamic_sampling": dynamic_sampling}
    output = ends(GRPOTrainer(config=make_tree({"rewards": ["verdict", f"{faulty}:{name}"], "rollout": rollout})))
    assert f'File "{faulty}", line ' in output
    assert "SystemExit: " in output
    watched = {"name": f"{faulty}:{name}", "weight": 0}
    tree = make_tree({"rewards": ["verdict", watched], "run": {"steps": 2}, "rollout": rollout}, "watched")
    with GRPOTrainer(config=tree) as trainer:
        trainer.train()
        assert trainer.step == 2
    assert any(f"the reward {name!r} failed" in r.getMessage() for r in caplog.records)


def test_a_piece_that_ends_python_is_an_error(make_tree, monkeypatch):
    """One that nothing asked about: the command would end with its exit code, 0 perhaps."""
    with GRPOTrainer(config=make_tree({})) as trainer:
        monkeypatch.setattr(trainer, "_collect", lambda stage: sys.exit(0))
        with pytest.raises(UserCodeError, match=r"asked Python to exit \(0\)"):
            trainer.train()


def test_so_does_the_evaluation_at_the_start(make_tree, faulty):
    tree = make_tree({"verifier": f"{faulty}:counts", "evaluation": {"at_start": True, "samples": 1}})
    tree["data"]["eval"] = tree["data"]["train"]
    output = ends(GRPOTrainer(config=tree))
    users_lines(output, faulty)
    assert "every answer of the evaluation at the start (6). What it raised:" in output


def test_training_again_with_the_same_broken_verifier_ends_again(make_tree, faulty):
    with GRPOTrainer(config=make_tree({"verifier": f"{faulty}:counts"})) as trainer:
        for _ in range(2):
            with pytest.raises(UserCodeError, match="Nothing was trained"):
                trainer.train()
        assert trainer.step == 0


@pytest.mark.gate
def test_the_error_names_the_steps_that_are_saved(make_tree, faulty, monkeypatch):
    """After an sft stage, and on a resume; an evaluation says nothing of training."""
    demonstrated = {"stages": [{"kind": "sft", "steps": 2}, {"kind": "grpo", "steps": 2}], "run": {"steps": None}}
    saved = (
        "failed on every answer that it was asked for (8). Steps 1 to {} are saved: correct it and go on with "
        "--resume auto."
    )
    with GRPOTrainer(config=make_tree({"verifier": f"{faulty}:counts", **demonstrated})) as trainer:
        with pytest.raises(UserCodeError, match=re.escape(saved.format(2))):
            trainer.train()
        assert (trainer.folder.checkpoints / "step-2").is_dir()
        tasks = [{"prompt": "1=?", "answer": "1"}, {"prompt": "2=?", "answer": "2"}]
        assert trainer.evaluate(tasks)["eval/undecided"] == 1  # later evaluations go on
    service = make_tree({"verifier": f"{faulty}:service"}, "resumed")
    with GRPOTrainer(config=service) as trainer:
        trainer.train(1)
    monkeypatch.setenv("RLVR_TEST_SERVICE", "down")
    with GRPOTrainer(config=service) as trainer, pytest.raises(UserCodeError, match=re.escape(saved.format(1))):
        trainer.train(resume="auto")
    with GRPOTrainer(config=make_tree({"verifier": f"{faulty}:counts"}, "alone")) as trainer:
        with pytest.raises(UserCodeError) as caught:
            trainer.evaluate(tasks)
        assert not re.search("train|resume|start again", str(caught.value).split("What it raised")[0])


def test_one_of_several_verifiers_is_judged_by_itself(make_tree, faulty, tmp_path):
    rows = [
        {"prompt": f"{n}=?", "answer": "1", "verifier": f"{faulty}:{'counts' if n % 2 else 'always'}"} for n in range(6)
    ]
    data = tmp_path / "mixed.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with GRPOTrainer(
        config=make_tree({"verifier": None, "data": {"train": str(data)}, "run": {"steps": 9}})
    ) as trainer:
        with pytest.raises(UserCodeError) as caught:
            trainer.train()
        assert 1 <= trainer.step < 5
    users_lines(str(caught.value), faulty)
    assert re.match(r"the verifier 'counts' failed on every answer that it was asked for \(\d+\)", str(caught.value))
    assert f"Steps 1 to {trainer.step} are saved" in str(caught.value)


@pytest.mark.parametrize("how", ["weighted", "routed"])
def test_a_combination_names_its_broken_part(make_tree, faulty, how):
    parts = {"good": f"{faulty}:always", "default": f"{faulty}:counts"}
    output = ends(GRPOTrainer(config=make_tree({"verifier": {"name": "combine", "how": how, "parts": parts}})))
    users_lines(output, faulty)
    assert "the verifier 'CombineVerifier/default' failed on every answer that it was asked for (8)." in output


@pytest.mark.gate
def test_a_part_that_always_raises_ends_the_run_whatever_the_others_decide(make_tree, faulty, caplog):
    """The others score 1 or 0, so that no verdict is missing; the part may be one of a combination within."""
    good, counts = f"{faulty}:always", f"{faulty}:counts"
    inner = {"name": "combine", "how": "any", "parts": {"counts": counts, "always": good}}
    for how, parts, name in (
        ("any", {"always": good, "counts": counts}, "counts"),
        ("all", {"never": f"{faulty}:never", "counts": counts}, "counts"),
        ("weighted", {"always": good, "inner": inner}, "inner/counts"),
        ("gated", {"gate": counts, "always": good}, "gate"),
    ):
        tree = make_tree({"verifier": {"name": "combine", "how": how, "parts": parts}}, how)
        output = ends(GRPOTrainer(config=tree))
        users_lines(output, faulty)
        assert (
            f"the verifier 'CombineVerifier/{name}' failed on every answer that it was asked for (8). Nothing" in output
        )
    watched = {"always": {"name": good, "weight": 1}, "counts": {"name": counts, "weight": 0}}
    tree = make_tree({"verifier": {"name": "combine", "parts": watched}, "run": {"steps": 1}}, "watched")
    with GRPOTrainer(config=tree) as trainer:  # a part of weight 0 is only reported
        trainer.train()
    some = {"sometimes": f"{faulty}:sometimes", "always": good}
    tree = make_tree({"verifier": {"name": "combine", "how": "any", "parts": some}, "run": {"steps": 2}}, "some")
    with GRPOTrainer(config=tree) as trainer:
        trainer.train()
        assert [row["verdict/raised"] for row in trainer.metrics] == [0, 0]  # no verdict is missing
    (warned,) = [r.getMessage() for r in caplog.records if "'CombineVerifier/sometimes' failed" in r.getMessage()]
    assert warned.endswith("KeyError: 'even'")


def test_a_part_that_few_answers_are_routed_to_is_judged_by_itself(make_tree, faulty, tmp_path, capsys):
    """As one of several verifiers is, over as many answers as the first step has; an evaluation names it."""
    rows = [{"prompt": f"{n}=?", "answer": "1", "source": "odd" if n % 2 else "even"} for n in range(6)]
    data = tmp_path / "sources.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {"odd": f"{faulty}:counts", "even": f"{faulty}:always"}
    verifier = {"name": "combine", "how": "routed", "parts": parts}
    tree = make_tree({"verifier": verifier, "data": {"train": str(data)}, "run": {"steps": 9}})
    with GRPOTrainer(config=tree) as trainer:
        with pytest.raises(UserCodeError) as caught:
            trainer.train()
        assert 1 <= trainer.step < 5
    users_lines(str(caught.value), faulty)
    assert str(caught.value).startswith(
        "the verifier 'CombineVerifier/odd' failed on every answer that it was asked for ("
    )
    given = ["--model", str(trainer.folder.path), "--data", str(data), "--samples", "0"]
    assert evaluate([*given, "--output", str(tmp_path / "result.json")]) == 0
    output = capsys.readouterr().err
    assert (
        "warning: the verifier 'CombineVerifier/odd' failed on 3 of 3 answers" in output
        and "'CombineVerifier'" not in output
    )


def test_a_reward_of_weight_0_that_always_raises_is_a_warning(make_tree, faulty, caplog):
    watched = {"name": f"{faulty}:counts", "weight": 0}
    with GRPOTrainer(config=make_tree({"rewards": ["verdict", watched], "run": {"steps": 2}})) as trainer:
        trainer.train()
        assert [row["reward/raised"] for row in trainer.metrics] == [8, 8]
        assert all(row["reward/mean"] is not None for row in trainer.metrics)
    (output,) = [r.getMessage() for r in caplog.records if "the reward 'counts' failed" in r.getMessage()]
    assert "failed on all 8 answers of a step" in output
    users_lines(output, faulty)


def test_a_reward_of_the_batch_of_weight_0_that_fails_is_a_warning(make_tree, faulty, caplog):
    """Also one that returns the wrong number of values, and one within a term of weight 0."""
    watched = [
        {"name": f"{faulty}:whole", "weight": 0},
        {"name": f"{faulty}:short", "weight": 0},
        {"name": "sum", "as": "outer", "weight": 0, "terms": [{"name": f"{faulty}:whole", "as": "inner"}]},
    ]
    plain = make_tree({"run": {"steps": 2}}, "plain")
    with GRPOTrainer(config=make_tree({"rewards": ["verdict", *watched], "run": {"steps": 2}})) as trainer:
        trainer.train()
        weights = [p.detach().clone() for p in trainer.policy.model.parameters()]
        for name in ("whole", "short", "outer", "inner"):
            assert np.isnan(trainer.batch.column(f"reward/{name}")).all()
    with GRPOTrainer(config=plain) as trainer:
        trainer.train()
        assert all(a.equal(b) for a, b in zip(weights, trainer.policy.model.parameters(), strict=True))
    output = [r.getMessage() for r in caplog.records if "Its weight is 0" in r.getMessage()]
    assert len(output) == 3
    assert "the reward 'whole' failed on a batch" in output[0]
    assert "NameError: name 'lenght' is not defined" in output[0]
    assert "reward 'short' returned shape (1,) for 8 rollouts" in output[1]


def test_a_verifier_that_cannot_be_made_is_refused_with_the_users_lines(make_tree, faulty, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(make_tree({"verifier": f"{faulty}:Made"})))
    assert main(["--config", str(file)]) == 2
    output = capsys.readouterr().err.rstrip()
    assert output.startswith(f"error: verifier: verifier '{faulty}:Made' cannot be made. What it raised:\nTraceback")
    users_lines(output, faulty)


def test_so_is_a_class_given_from_python(make_tree, faulty):
    scope = runpy.run_path(str(faulty))
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer(config=make_tree(), verifier=scope["Made"])
    output = str(caught.value)
    assert output.startswith("verifier 'Made' cannot be made. What it raised:\nTraceback")
    users_lines(output, faulty)


def test_an_import_that_fails_in_the_worker_alone_ends_the_run_too(make_tree, tmp_path):
    file = tmp_path / "imports.py"
    file.write_text(
        "import multiprocessing, os, sys\n"
        "if os.environ.get('CUDA_VISIBLE_DEVICES') == '':  # a worker\n    import not_installed\n"
        "from rlvr.verifiers import Needs, Verifier\n"
        "class Far(Verifier):\n    needs = Needs(process=True)\n    def verify(self, task, completion): return 1.0\n"
    )
    output = ends(GRPOTrainer(config=make_tree({"verifier": f"{file}:Far"})))
    assert f'File "{file}", line 3' in output
    assert output.endswith("ModuleNotFoundError: No module named 'not_installed'")


def test_one_that_raises_on_some_answers_is_said_once_and_counted(make_tree, faulty, caplog):
    change = {"verifier": f"{faulty}:sometimes", "rewards": ["verdict", f"{faulty}:sometimes"], "run": {"steps": 4}}
    with GRPOTrainer(config=make_tree(change)) as trainer:
        trainer.train()
        rows = trainer.metrics
    output = [record.getMessage() for record in caplog.records if "answers of a step, which" in record.getMessage()]
    assert sorted(text.split("'")[0] for text in output) == ["the reward ", "the verifier "]
    assert all(f'File "{faulty}"' in text and text.endswith("KeyError: 'even'") for text in output)
    assert all(re.search(r"failed on (all 8|[1-7] of 8) answers of a step", text) for text in output)
    assert sum(row["verdict/raised"] for row in rows) == sum(row["reward/raised"] for row in rows) > 0
    kept = [row for path in trainer.folder.path.glob("rollouts/*.jsonl") for row in lines(path)]
    tracebacks = [v["traceback"] for row in kept for v in row["verdicts"].values() if "traceback" in v]
    assert len(tracebacks) == sum(row["verdict/raised"] for row in rows)


def test_undecided_rewards_have_their_own_monitor_and_all_right_keeps_still():
    def rows(**values):
        return [{"step": step, "run/stage": "grpo", **values} for step in range(1, 21)]

    none = {"verdict/error": 0.0, "verdict/timeout": 0.0, "reward/undecided": 1.0, "reward/mean": None}
    right = rows(**none, **{"group/all_correct": 1.0, "group/all_wrong": 0.0, "group/zero_variance": 0.0})
    assert [f.monitor for f in findings_of(right)] == ["undecided_rewards"]
    wrong = rows(**none, **{"group/all_correct": 0.0, "group/all_wrong": 1.0, "group/zero_variance": 0.0})
    assert [f.monitor for f in findings_of(wrong)] == ["undecided_rewards"]
    errors = rows(**{**none, "verdict/error": 1.0})
    assert [f.monitor for f in findings_of(errors)] == ["verifier_errors"]


@pytest.mark.alone
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_ends_with_1_and_the_users_lines(make_tree, faulty, tmp_path, ranks):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(make_tree({"verifier": f"{faulty}:counts", "logging": {"console": "plain"}})))
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launcher, "-m", "rlvr.train", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: the verifier 'counts' failed on every answer") :]
    if ranks == 1:
        users_lines(error.rstrip(), faulty)
        assert "Traceback" in error and error.count('File "') == 1
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()
    assert not list((tmp_path / "runs/run").glob("checkpoints/*"))
