"""A verifier or reward that raises: on every answer it ends the run with the user's traceback, on some it is said once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from rlvr.errors import TrainingError
from rlvr.monitor.health import findings_of
from rlvr.trainer import GRPOTrainer
from small_run import lines

FAULTY = """
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

def sometimes(completion):
    if completion[:1] in tuple("02468="):
        raise KeyError("even")
    return float(len(completion) > 3)

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
    said = ends(GRPOTrainer(config=make_tree({"verifier": f"{faulty}:{name}"})))
    users_lines(said, faulty)
    assert "failed on every answer of the first step (8)" in said


def test_so_does_one_that_never_returns_a_number(make_tree, faulty):
    said = ends(GRPOTrainer(config=make_tree({"verifier": f"{faulty}:text"})))
    assert "text returned str, not a number" in said


def test_so_do_reward_terms_of_one_answer_and_of_the_batch(make_tree, faulty):
    said = ends(GRPOTrainer(config=make_tree({"rewards": ["verdict", f"{faulty}:counts"]}, "one")))
    users_lines(said, faulty)
    assert "the reward 'counts' failed on every answer" in said
    said = ends(GRPOTrainer(config=make_tree({"rewards": ["verdict", f"{faulty}:whole"]}, "batch")))
    users_lines(said, faulty)


def test_so_does_the_evaluation_at_the_start(make_tree, faulty):
    tree = make_tree({"verifier": f"{faulty}:counts", "evaluation": {"at_start": True, "samples": 1}})
    tree["data"]["eval"] = tree["data"]["train"]
    said = ends(GRPOTrainer(config=tree))
    users_lines(said, faulty)
    assert "every answer of the evaluation at the start" in said


def test_an_import_that_fails_in_the_worker_alone_ends_the_run_too(make_tree, tmp_path):
    file = tmp_path / "imports.py"
    file.write_text(
        "import multiprocessing, os, sys\n"
        "if os.environ.get('CUDA_VISIBLE_DEVICES') == '':  # a worker\n    import not_installed\n"
        "from rlvr.verifiers import Needs, Verifier\n"
        "class Far(Verifier):\n    needs = Needs(process=True)\n    def verify(self, task, completion): return 1.0\n"
    )
    said = ends(GRPOTrainer(config=make_tree({"verifier": f"{file}:Far"})))
    assert f'File "{file}", line 3' in said
    assert said.endswith("ModuleNotFoundError: No module named 'not_installed'")


def test_one_that_raises_on_some_answers_is_said_once_and_counted(make_tree, faulty, caplog):
    change = {"verifier": f"{faulty}:sometimes", "rewards": ["verdict", f"{faulty}:sometimes"], "run": {"steps": 4}}
    with GRPOTrainer(config=make_tree(change)) as trainer:
        trainer.train()
        rows = trainer.metrics
    said = [record.getMessage() for record in caplog.records if "failed on some answers" in record.getMessage()]
    assert sorted(text.split("'")[0] for text in said) == ["the reward ", "the verifier "]
    assert all(f'File "{faulty}"' in text and text.endswith("KeyError: 'even'") for text in said)
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
