"""python -m rlvr.evaluate on a tiny model: the same figures as the trainer's own evaluation, and bad input."""

from __future__ import annotations

import json

import pytest

from rlvr.evaluate import main

TASKS = [{"prompt": f"{k}+{k}=", "answer": str(k % 4), "id": f"t{k}"} for k in range(6)]
VERIFIER = """
def even(completion, answer):
    \"\"\"Right where the first digit is even.\"\"\"
    digits = [c for c in completion if c.isdigit()]
    return float(bool(digits) and int(digits[0]) % 2 == 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, tasks and a verifier."""
    from rlvr.config import ModelConfig, ScratchConfig
    from rlvr.policy import load_policy

    path = tmp_path_factory.mktemp("evaluate")
    scratch = ScratchConfig(hidden_size=32, layers=2, intermediate_size=64, context=48, init_std=0.2)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu"), 0)
    for name in ("model", "run/checkpoints/step-3/model", "run/checkpoints/step-12/model"):
        policy.model.save_pretrained(path / name)
        policy.tokenizer.save_pretrained(path / name)
    (path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    (path / "even.py").write_text(VERIFIER)
    return path


@pytest.fixture
def run(folder, capsys):
    """`run(*arguments)`: exit code, the JSON object on the standard output (or None), and the errors."""

    def call(*arguments, model="model"):
        capsys.readouterr()
        given = ["--model", str(folder / model), "--data", str(folder / "tasks.jsonl"), "--max-new-tokens", "6"]
        code = main([*given, "--verifier", f"{folder / 'even.py'}:even", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out.strip() else None, err

    return call


def test_it_writes_what_the_trainer_would_find(run, folder, tmp_path):
    from rlvr.trainer import GRPOTrainer

    code, got, _ = run("--samples", "4", "--k", "1,2,4", "--seed", "3")
    assert code == 0 and got is not None
    config = {
        "run": {"dir": str(tmp_path), "seed": 3, "steps": 1},
        "rollout": {"max_new_tokens": 6},
        "evaluation": {"samples": 4, "k": [1, 2, 4]},
        "logging": {"console": "off"},
    }
    tasks = str(folder / "tasks.jsonl")
    with GRPOTrainer(str(folder / "model"), tasks, f"{folder / 'even.py'}:even", config, eval_tasks=tasks) as trainer:
        expected = trainer.evaluate()
    for name in ("greedy", "mean", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "truncated", "length_mean"):
        assert got["results"][name] == expected[f"eval/{name}"], name
    assert 0 < got["results"]["pass@4"] <= 1
    low, high = got["results"]["mean interval"]
    assert low <= got["results"]["mean"] <= high
    assert [row["id"] for row in got["by_task"]] == [task["id"] for task in TASKS]
    assert "iqm" in got["results"] and got["by_source"]["tasks"]["tasks"] == 6


def test_a_run_means_its_newest_checkpoint(run, folder):
    code, got, _ = run("--samples", "1", model="run")
    assert code == 0 and got is not None and got["model"].endswith("step-12/model")
    code, got, _ = run("--samples", "1", model="run/checkpoints/step-3")
    assert code == 0 and got is not None and got["model"].endswith("step-3/model")


def test_compare_and_contamination(run, folder, tmp_path):
    output = tmp_path / "deep" / "first.json"
    assert run("--samples", "4", "--output", str(output))[:2] == (0, None)
    code, got, _ = run("--samples", "4", "--compare", str(output), "--contamination", str(folder / "tasks.jsonl"))
    assert code == 0 and got is not None
    same = got["comparison"]["differences"]["mean"]
    assert (same["difference"], same["interval"], same["tasks"]) == (0.0, [0.0, 0.0], 6)
    support = got["comparison"]["support"]
    assert support["gained"] == support["lost"] == 0 and support["both"] + support["neither"] == 6
    assert got["contamination"]["share"] == 1.0
    assert not list(tmp_path.rglob("*.partial"))


def test_greedy_alone(run):
    code, got, _ = run("--samples", "0")
    assert code == 0 and got is not None
    assert "pass@1" not in got["results"] and got["results"]["greedy"] is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "4", "--k", "8"], "pass@8 cannot be estimated from 4 samples"),
        (["--k", "0"], "pass@0"),
        (["--k", "some"], "--k is a list of numbers"),
        (["--samples", "-1"], "--samples"),
        (["--samples", "0", "--no-greedy"], "nothing to evaluate"),
        (["--compare", "nowhere.json"], "cannot be read"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["rollout.max_new_token=3"], "max_new_tokens"),
        (["--engine", "hff"], "did you mean 'hf'"),
    ],
)
def test_bad_input_is_named(run, arguments, said):
    code, _, err = run(*arguments)
    assert code == 2 and said in err and "Traceback" not in err


def test_a_result_that_is_none_is_refused(run, tmp_path):
    (tmp_path / "other.json").write_text('{"by_task": [{"of": "another"}]}')
    code, _, err = run("--compare", str(tmp_path / "other.json"))
    assert code == 2 and "is no result" in err
