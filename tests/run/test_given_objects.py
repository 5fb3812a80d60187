"""Runs that were made from Python: their folder says how to evaluate, replay and reproduce them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

import pytest
import yaml

from rlvr import MathVerifier, Task, Verdict, Verifier, registry
from rlvr.config.config_loading import load_config
from rlvr.data import load_tasks
from rlvr.data.samplers import fingerprint_of
from rlvr.errors import CheckpointError, ConfigError
from rlvr.evaluate import main as evaluate
from rlvr.replay.__main__ import main as replay
from rlvr.run.given_objects import verifier_as_written
from rlvr.train import main as train
from rlvr.verifiers import CombineVerifier
from rlvr.verifiers.pool import Verification
from small_run import TREE, lines, overlaid, task_rows, timeless

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from rlvr import GRPOTrainer, Task
from rlvr.registry import register_reward
from helper import share

torch.set_num_threads(1)
with open("imported", "a") as log:
    print(__name__, file=log)

def even(completion, answer, *, bonus: float = 0.0):
    return share(completion) + bonus * (answer in completion)

@register_reward("short")
def shortness(batch):
    return [-0.01 * rollout.completion_length for rollout in batch.rollouts]

tasks = [Task(**row) for row in json.loads(Path("rows.json").read_text())]
config = json.loads(Path("tree.json").read_text())
trainer = GRPOTrainer(None, tasks[:4], even, config, eval_tasks=tasks[4:])
trainer.train(resume=sys.argv[1] if sys.argv[1:] else None)
trainer.close()
"""
"""A script as people write it: without `if __name__ == "__main__":`, with a helper beside it and a registered piece."""

HELPER = '''
def share(text):
    """The share of even digits."""
    return sum(c in "02468" for c in text) / max(1, len(text))
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script in a project folder, to be run from the folder above it. What it registers is forgotten after the
    test."""
    registry.names("reward")
    monkeypatch.setitem(registry._components, "reward", dict(registry._components["reward"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "run.py").write_text(SCRIPT)
    (tmp_path / "project" / "helper.py").write_text(HELPER)
    rows = task_rows()
    rows[1] |= {"info": {"level": 2, "answer": "?"}, "source": "odd one"}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    over = {
        "run": {"dir": "runs", "name": "first"},
        "data": {"fields": {"prompt": "question"}},  # of other files, not of tasks given as objects
        "rewards": ["verdict", {"name": "short", "weight": 0.5}],
        "evaluation": {"every": 2, "samples": 2, "k": [1, 2]},
        "stages": [{"kind": "sft", "steps": 1}, {"kind": "grpo", "verifier": "math"}],
    }
    (tmp_path / "tree.json").write_text(json.dumps(overlaid(TREE, over)))
    return tmp_path


def run_script(*arguments):
    done = subprocess.run([sys.executable, "project/run.py", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_a_run_of_a_script_is_reproduced_evaluated_and_replayed_from_its_folder(script, capsys):
    run_script()
    first = script / "runs" / "first"
    written = yaml.safe_load((first / "config.yaml").read_text())
    assert written["verifier"] == "project/run.py:even"
    assert written["imports"] == ["project/run.py"]
    assert written["data"]["train"] == {"path": "runs/first/tasks.jsonl", "fields": {}, "source": ""}
    assert written["data"]["eval"]["path"] == "runs/first/eval_tasks.jsonl"
    assert written["stages"] == [{"kind": "sft", "steps": 1}, {"kind": "grpo"}]
    tasks = [Task(**row) for row in json.loads((script / "rows.json").read_text())]
    assert load_tasks(written["data"]["train"], fields={"prompt": "question"}) == tasks[:4]

    shutil.move("runs/first", "runs/elsewhere")  # a folder may be moved
    rows = lines("runs/elsewhere/metrics.jsonl")
    (script / "imported").unlink()
    assert train(["--config", "runs/elsewhere/config.yaml", "run.name=again"]) == 0
    again = lines("runs/again/metrics.jsonl")
    assert timeless(again) == timeless(rows)
    assert again[-1]["reward/short"] is not None
    assert again[-1]["eval/greedy"] is not None
    loaded = (script / "imported").read_text().split()
    assert loaded
    assert all(
        name.startswith("rlvr_file_run") for name in loaded
    )  # as a file of pieces, and trained by the command alone

    capsys.readouterr()
    assert evaluate(["--model", "runs/elsewhere", "--samples", "2", "--no-greedy"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["results"]["mean"] == again[-1]["eval/mean"]
    assert replay(["runs/elsewhere", "--output", "replayed.jsonl"]) == 0
    assert all(row["before"]["columns"] == row["after"]["columns"] for row in lines("replayed.jsonl"))


@pytest.mark.slow
def test_a_run_of_a_script_goes_on_by_the_script_and_by_the_command(script):
    tree = json.loads((script / "tree.json").read_text())
    run_script()
    for steps, go_on in ((4, partial(run_script, "auto")), (5, None), (6, partial(run_script, "auto"))):
        tree["run"]["steps"] = steps
        (script / "tree.json").write_text(json.dumps(tree))
        if go_on is None:
            assert train(["--config", "runs/first/config.yaml", "--resume", "auto", f"run.steps={steps}"]) == 0
        else:
            go_on()
        assert len(lines("runs/first/metrics.jsonl")) == steps
    assert sorted(path.name for path in (script / "runs" / "first").glob("*.old-*")) == []


def test_other_tasks_are_refused_by_fingerprint_and_kept_apart_where_that_is_accepted(make_trainer, tmp_path):
    over = {"data": {"train": None}, "verifier": None}
    rows = task_rows()
    own = tmp_path / "runs" / "own" / "tasks.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("of the user")
    with pytest.raises(ConfigError, match=r"holds tasks\.jsonl, and no config\.yaml"):
        make_trainer(over, name="own", tasks=rows, verifier="exact").train()
    trainer = make_trainer(over, tasks=rows, verifier="exact")
    trainer.train()
    trainer.close()
    folder = trainer.folder.path
    before = (folder / "tasks.jsonl").read_bytes()
    more = {"run": {"steps": 4}}
    rows[0]["answer"] = "7"
    with pytest.raises(CheckpointError, match="made with other tasks"):
        make_trainer(overlaid(over, more), tasks=rows, verifier="exact").train(resume="auto")
    assert (folder / "tasks.jsonl").read_bytes() == before
    other = make_trainer(
        overlaid(over, {**more, "checkpoint": {"accept_changed_data": True}}), tasks=rows, verifier="exact"
    )
    other.train(resume="auto")
    assert load_tasks(str(folder / "tasks.jsonl"))[0].answer == "7"
    (aside,) = folder.glob("tasks.jsonl.old-*")
    assert aside.read_bytes() == before


def test_a_run_that_overwrites_the_one_its_tasks_are_of_keeps_them(make_trainer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    over = {"run": {"dir": "runs"}, "data": {"train": None}, "verifier": None}
    trainer = make_trainer(over, tasks=task_rows(), verifier="exact", model=None)
    trainer.train()
    trainer.close()
    assert train(["--config", "runs/run/config.yaml", "run.overwrite=true"]) == 0
    assert len(load_tasks("runs/run/tasks.jsonl")) == len(task_rows())
    (old,) = (tmp_path / "runs").glob("run.old-*")
    config = load_config(old / "config.yaml")
    assert config.data.train["path"] == str(old / "tasks.jsonl")  # its own, not those of the run in its place


def test_too_many_tasks_are_counted_in_words(make_trainer, monkeypatch):
    monkeypatch.setattr("rlvr.run.given_objects.LARGEST", 100)
    trainer = make_trainer({"data": {"train": None}}, tasks=task_rows(), verifier="exact")
    trainer.train(1)
    written = yaml.safe_load((trainer.folder.path / "config.yaml").read_text())["data"]["train"]
    assert written.startswith("<6 tasks as objects (fingerprint ")
    assert not (trainer.folder.path / "tasks.jsonl").exists()
    with pytest.raises(ConfigError, match=r"data set: the run was given 6 tasks as objects .*: give another data set"):
        load_tasks(written)


def whole(completion):
    return 1.0


def weighing(completion, *, weight: float = 1.0):
    return weight


@dataclass
class Kept(Verifier):
    value: float = 1.0
    words: tuple[str, ...] = ()

    def verify(self, task, completion):
        return Verdict.from_score(self.value)


class Lost(Verifier):
    def __init__(self, weight: float):
        self.doubled = 2 * weight

    def verify(self, task, completion):
        return Verdict.from_score(self.doubled)


def test_verifiers_are_written_by_a_name_that_leads_to_them(monkeypatch, request):
    here = "tests/run/test_given_objects.py"
    monkeypatch.chdir(request.config.rootpath)
    assert verifier_as_written(whole) == f"{here}:whole"
    assert verifier_as_written(Kept) == f"{here}:Kept"
    assert verifier_as_written(Kept()) == f"{here}:Kept"
    assert verifier_as_written(Kept(0.5, ("a", "b"))) == {"name": f"{here}:Kept", "value": 0.5, "words": ["a", "b"]}
    assert verifier_as_written(partial(weighing, weight=0.5)) == {"name": f"{here}:weighing", "weight": 0.5}
    assert verifier_as_written(MathVerifier()) == "math"
    assert verifier_as_written("exact") == "exact"
    assert verifier_as_written(json.dumps) == "json:dumps"
    parts = [{"name": MathVerifier(), "weight": 1}, {"name": Kept(0.5), "weight": 2.0}, {"name": whole, "weight": 1}]
    combined = CombineVerifier(parts)
    assert verifier_as_written(combined) == {
        "name": "combine",
        "parts": [
            {"name": "math", "weight": 1},
            {"name": f"{here}:Kept", "value": 0.5, "weight": 2.0},
            {"name": f"{here}:whole", "weight": 1},
        ],
    }
    again = registry.build("verifier", verifier_as_written(combined))
    assert list(again.weights.values()) == [1, 2.0, 1]
    assert list(again.verifiers.values())[1].value == 0.5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lambda completion: 1.0, r"<a lambda \(test_given_objects.py, line \d+\)>"),
        (lambda: closure(2), r"<inner, which is defined inside a function \(test_given_objects.py, line \d+\)>"),
        (lambda: Lost(1.0), "<an object of class Lost, which does not keep its option 'weight' as an attribute>"),
        (
            lambda: CombineVerifier([{"name": partial(weighing, weight=2.0), "weight": 1.0}]),
            "<an object of class CombineVerifier with parts=.*, whose option 'weight' is also a key beside its name>",
        ),
        (lambda: Kept(object()), "<an object of class Kept with value=an object of class object>"),
        (lambda: partial(whole, "text"), r"<a functools.partial of whole, which binds more than .*>"),
        (lambda: of_notebook(), "<check, which is defined in a notebook or at a prompt>"),
    ],
)
def test_what_cannot_be_written_is_in_words_and_refused_where_it_is_used(make, words, make_trainer, request):
    written = verifier_as_written(make())
    assert re.fullmatch(words, written)
    load_config({"verifier": written})  # a command that names another verifier, or needs none, can read it
    with pytest.raises(
        ConfigError, match=r"verifier: the run was given .*, in Python, and a file cannot say where that is"
    ):
        registry.build("verifier", written)
    further = load_config({"verifiers": {"second": written}}).verifiers
    with pytest.raises(ConfigError, match=r"^verifiers\.second: the run was given .*: give another verifiers\.second$"):
        Verification(None, None, further)


def closure(weight):
    def inner(completion):
        return weight

    return inner


def of_notebook():
    space = {"__name__": "notebook"}
    exec("def check(completion): return 1.0", space)
    return space["check"]


@pytest.mark.gate
def test_import_stands_in_for_what_a_notebook_registered(make_trainer, tmp_path, monkeypatch, capsys):
    registry.names("reward")
    monkeypatch.setitem(registry._components, "reward", dict(registry._components["reward"]))

    def near(batch):
        return [0.5] * len(batch)

    near.__module__ = "a_notebook"  # which is no file
    registry.register("reward", "near")(near)
    trainer = make_trainer({"rewards": ["verdict", {"name": "near", "weight": 0.5}]}, eval_tasks=task_rows(2))
    trainer.train()
    trainer.close()
    run = str(trainer.path)
    assert load_facts(trainer.path)["0 grpo"]["eval"]["source"] == "given in Python"
    del registry._components["reward"]["near"]
    for command in (replay, evaluate):
        capsys.readouterr()
        assert command([run] if command is replay else ["--model", run]) == 2
        missing = "there is no reward 'near'" if command is replay else "the reward 'near', which a notebook"
        assert missing in capsys.readouterr().err
    source = (
        "from rlvr import register_reward\n\n@register_reward('near')\ndef near(batch): return [0.5] * len(batch)\n"
    )
    (tmp_path / "near.py").write_text(source)
    again = ["--import", str(tmp_path / "near.py")]
    assert replay([run, *again, "--output", str(tmp_path / "again.jsonl")]) == 0
    assert all(row["before"]["columns"] == row["after"]["columns"] for row in lines(tmp_path / "again.jsonl"))
    assert evaluate(["--model", run, *again, "--samples", "0"]) == 0


def test_the_number_and_the_hash_of_the_tasks_are_written(make_trainer, tmp_path):
    stages = [{"kind": "grpo", "steps": 1}, {"kind": "grpo", "name": "second", "steps": 1, "data": {"limit": 3}}]
    trainer = make_trainer({"stages": stages}, eval_tasks=task_rows(2))
    trainer.train()
    facts = load_facts(trainer.path)
    tasks = load_tasks(str(tmp_path / "tasks.jsonl"))
    assert facts["0 grpo"]["train"] == {
        "tasks": 6,
        "fingerprint": fingerprint_of(tasks),
        "source": str(tmp_path / "tasks.jsonl"),
    }
    assert facts["1 second"]["train"]["tasks"] == 3
    assert facts["1 second"]["train"]["fingerprint"] == fingerprint_of(tasks[:3])
    assert facts["0 grpo"]["eval"] == {
        "tasks": 2,
        "fingerprint": fingerprint_of(load_tasks(task_rows(2))),
        "source": "given in Python",
    }


def load_facts(folder):
    return json.loads((folder / "data.json").read_text())
