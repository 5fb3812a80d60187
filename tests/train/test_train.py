"""python -m rlvr.train: the run folder, the dry run, and exit code 2 with one clear message for bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from process_helpers import until
from rlvr import train
from rlvr.config.config_loading import load_config
from rlvr.monitor.recording import read_rollouts
from small_run import lines, task_rows, timeless

KEYS = """step, reward/mean, reward/std, loss/policy, loss/total, grad_norm, lr, kl/ref, entropy, ratio/mean,
ratio/clipped_low, ratio/clipped_high, mismatch/mean, mismatch/max, completion/length_mean, completion/truncated,
group/all_correct, group/all_wrong, group/mixed, verdict/correct, verdict/wrong, verdict/partial, verdict/unparsable,
verdict/timeout, verdict/error, tokens/trained, tokens/sampled, time/rollout, time/verify, time/score, time/update,
time/publish, time/step, time/unaccounted, policy/version, policy/staleness_max"""
"""The keys that scripts rely on, as they are documented."""


@pytest.fixture
def command(tmp_path, make_tree, capsys):
    """`command(*arguments, over={...})`: the exit code of rlvr.train.main on a small run, its output and its errors."""

    def run(*arguments, over=None, name="run"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(make_tree(over, name)))
        capsys.readouterr()
        code = train.main(["--config", str(path), *arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "run"


FIRST_LINE = """
import sys
from rlvr import train
from rlvr.core.startup_lines import StartupLines

class Shown(Exception):
    pass

def say(self, text):
    print(text, "torch" in sys.modules, file=sys.stderr)
    raise Shown

StartupLines.say = say
try:
    train.main(["--config", sys.argv[1]])
except Shown:
    pass
"""


def test_the_first_line_comes_before_torch_is_loaded(tmp_path, make_tree):
    """A check of the configuration loads torch for the classes that are named, which takes seconds."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(make_tree(None, "run")))
    done = subprocess.run([sys.executable, "-c", FIRST_LINE, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == f"reading {path} False\n", done.stderr


@pytest.mark.parametrize("mode", ["quiet", "off"])
def test_a_quiet_run_has_no_line_before_its_configuration_is_checked(command, mode):
    code, output, _ = command(f"logging.console={mode}", over={"nothing": 1})
    assert (code, output) == (2, "")


def start(path, *arguments):
    """The command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rlvr.train", "--config", str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_run_leaves_its_folder(command, folder, tmp_path):
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task_rows(3)))
    over = {"data": {"eval": str(tmp_path / "eval.jsonl")}, "evaluation": {"every": 2, "samples": 2, "k": [1, 2]}}
    code, out, err = command(over=over | {"logging": {"console": "plain"}})
    assert (code, err) == (0, "")
    assert str(folder) in out

    rows = lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {key.strip() for key in KEYS.split(",")} <= set(row)
        assert row["reward/mean"] is not None
        assert row["grad_norm"] > 0
        assert row["kl/ref"] is None
        assert row["ratio/mean"] == 1.0
        assert row["mismatch/max"] < 1e-4
        assert row["policy/staleness_max"] == 0
        assert 0 <= row["time/unaccounted"] <= row["time/step"]
    assert [row["policy/version"] for row in rows] == [1, 2, 3]
    assert list(rows[0]) == [key for key in rows[1] if not key.startswith("eval/")]

    evaluations = lines(folder / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2, 3]
    assert rows[1]["eval/pass@2"] == evaluations[1]["eval/pass@2"] is not None
    assert {"eval/greedy", "eval/mean", "eval/pass@1", "eval/maj@2", "stage"} <= set(evaluations[0])

    files = sorted((folder / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step-00000{n}.jsonl" for n in (1, 2, 3)]
    rollouts, columns = read_rollouts(files[0])
    assert len(rollouts) == 8
    np.testing.assert_allclose(columns["reward"], [r.verdict.score for r in rollouts])
    for group in {r.group for r in rollouts}:
        assert abs(sum(a for a, r in zip(columns["advantage"], rollouts, strict=True) if r.group == group)) < 1e-6
    assert np.isclose(columns["reward"].mean(), rows[0]["reward/mean"])

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "step-3" / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step-3" / "model")
    assert tokenizer.decode(tokenizer("12=?")["input_ids"]) == "12=?"
    assert model.get_input_embeddings().weight.shape[0] >= len(tokenizer)
    assert load_config(folder / "config.yaml").run.steps == 3


def test_the_saved_configuration_runs_the_same_again(command, folder, capsys):
    assert command()[0] == 0
    assert train.main(["--config", str(folder / "config.yaml"), "run.name=again"]) == 0
    again = lines(folder.parent / "again" / "metrics.jsonl")
    assert timeless(again) == timeless(lines(folder / "metrics.jsonl"))


@pytest.mark.gate
def test_a_saved_model_can_be_trained_on(command, folder):
    assert command("run.steps=1")[0] == 0
    model = folder / "checkpoints" / "step-1" / "model"
    code, _, err = command("run.steps=1", over={"model": {"scratch": None, "path": str(model)}}, name="second")
    assert (code, err) == (0, "")


def test_a_dry_run_refuses_an_objective_that_the_run_would_refuse(command):
    code, out, err = command("--dry-run", over={"algorithm": {"preset": "pacs"}})
    assert (code, out) == (2, "")
    assert "the loss 'pacs' is of the log-ratio" in err and "updates_per_batch to 2 or more" in err


def test_a_dry_run_refuses_sampling_that_cannot_be_trained_on(command):
    code, out, err = command("--dry-run", "rollout.top_p=0.9")
    assert (code, out) == (2, "")
    assert "rollout.top_p=0.9 cannot be trained on" in err


def test_a_dry_run_prints_the_plan_and_creates_nothing(command, tmp_path):
    over = {
        "optim": {"updates_per_batch": 2, "epochs_per_batch": 3, "micro_batch_size": 3},
        "stages": [{"kind": "sft", "steps": 4}, {"kind": "grpo", "steps": 5}],
        "run": {"steps": 7},
    }
    before = set(tmp_path.rglob("*"))
    code, out, err = command("--dry-run", "optim.lr=3e-4", over=over, name="dry")
    assert (code, err) == (0, "")
    made = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}  # Python's, of the file of pieces
    assert made - before <= {tmp_path / "dry.yaml", tmp_path / "tasks.jsonl"}
    tree, _, plan = out.partition("run folder: ")
    resolved = yaml.safe_load(tree)
    assert resolved["optim"]["lr"] == 3e-4
    assert resolved["algorithm"]["loss"]["name"] == "clip"
    assert load_config(resolved).dump() == resolved
    assert "stage 1 (sft): 4 steps, each of 2 demonstrations" in plan
    assert (
        "stage 2 (grpo): 3 steps, each of 2 prompts x 4 = 8 completions, at most 6 new tokens each (48 in all)" in plan
    )
    assert "2 x 3 optimizer steps of 4 completions in 2 micro-batches of 3; 18 optimizer steps in all" in plan


def test_a_dry_run_says_that_the_steps_of_epochs_are_counted_later(command):
    stages = [{"kind": "sft", "steps": 4}, {"kind": "grpo"}]
    over = {"stages": stages, "run": {"steps": None, "epochs": 1.5}}
    code, out, err = command("--dry-run", "logging.rollouts_gb=2", over=over, name="dry")
    assert (code, err) == (0, "")
    assert "stage 1 (sft): 4 steps" in out
    assert "stage 2 (grpo): the steps of run.epochs=1.5 passes over the tasks, counted when they are read, each" in out
    assert "0 steps" not in out and "0 optimizer steps" not in out
    assert "2.0 GB kept (logging.rollouts_gb)" in out


BAD_INPUT = {
    "no such data": (["data.train=none.jsonl"], {}, ["there is no data at 'none.jsonl'"]),
    "no tasks named": ([], {"data": {"train": None}}, ["data.train"]),
    "no such model": ([], {"model": {"scratch": None, "path": "/no/such/model"}}, ["model.path", "/no/such/model"]),
    "no model": ([], {"model": None}, ["model.path", "model.scratch"]),
    "unknown key": (["rollout.group_sise=3"], {}, ["rollout.group_sise: unknown key; did you mean 'group_size'?"]),
    "override without a value": (["optim.lr"], {}, ["'optim.lr' is not of the form key.path=value"]),
    "nothing to compare": (["rollout.group_size=1"], {}, ["rollout.group_size is 1", "set rollout.group_size to 2"]),
    "top_p": (["rollout.top_p=0.9"], {}, ["rollout.top_p=0.9 cannot be trained on", "Set it to 1.0"]),
    "top_k": (["rollout.top_k=5"], {}, ["rollout.top_k=5"]),
    "min_p": (["rollout.min_p=0.1"], {}, ["rollout.min_p=0.1"]),
    "greedy training": (["rollout.temperature=0"], {}, ["rollout.temperature 0"]),
    "no verifier": ([], {"verifier": None}, ["task 't0' names no verifier", "verifier=math"]),
    "unknown verifier": (["verifier=mth"], {}, ["verifier: there is no verifier 'mth'; did you mean 'math'?"]),
    "a verifier's file": (["verifier=none.py:f"], {}, ["there is no file", "none.py"]),
    "long prompts": (
        ["data.max_prompt_tokens=2"],
        {},
        ["task 't0': its prompt has 3 tokens, and 1 to 2 are possible", "6 of 6", "data.skip_long_prompts=true"],
    ),
    "all too long": (["data.max_prompt_tokens=2", "data.skip_long_prompts=true"], {}, ["all 6 tasks are too long"]),
    "k over samples": (
        [],
        {"evaluation": {"samples": 2, "k": [1, 4]}},
        ["evaluation: pass@4 needs at least 4 `samples`, there are 2"],
    ),
    "two micro-batches": (
        ["optim.micro_batch_size=1", "optim.micro_batch_tokens=9"],
        {},
        ["optim: `micro_batch_size` and `micro_batch_tokens` exclude each other"],
    ),
    "no steps": (["run.steps=null"], {}, ["stage 'grpo' has no number of steps: set run.steps"]),
    "a shape of a model": (["model.scratch.heads=3"], {}, ["model.scratch: heads (3) must divide hidden_size (32)"]),
    "key and value heads": (["model.scratch.kv_heads=3"], {}, ["model.scratch: kv_heads (3) must divide heads (2)"]),
    "no GPU": (["model.device=cuda:7"], {}, ["model.device is 'cuda:7'"]),
    "nothing to resume": (["--resume", "/no/such/run"], {}, ["--resume: there is no run or checkpoint /no/such/run"]),
    "missing fields": (["data.fields={prompt: question}"], {}, ["tasks.jsonl, line 1", "'question'"]),
    "the same reward twice": (["rewards=[verdict, verdict]"], {}, ["'verdict' stands there twice"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_message(command, folder, case):
    if case == "no GPU":
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    arguments, over, output = BAD_INPUT[case]
    code, out, err = command(*arguments, over=over)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "Traceback" not in err + out
    for part in output:
        assert part in err
    assert not folder.exists()


WITHOUT_LOADING = {
    "the same reward twice": (["rewards=[verdict, verdict]"], ["the term 'verdict' stands there twice"]),
    "a weight": (["rewards=[{name: verdict, weight: high}]"], ["rewards[0]: the weight of 'verdict' is 'high'"]),
    "a term's verifier": (
        ["verifiers={number: math}", "rewards=[verdict, {name: verdict, as: n, verifier: nunber}]"],
        ["there is no verifier 'nunber' in `verifiers`; did you mean 'number'?"],
    ),
    "nothing to compare": (["rollout.group_size=1"], ["rollout.group_size is 1"]),
    "no such data": (
        ["data.train=task.jsonl"],
        ["data.train: there is no data at 'task", "did you mean 'tasks.jsonl'?"],
    ),
    "no such evaluation data": (["evaluation.data=none.jsonl"], ["evaluation.data: there is no data at 'none.jsonl'"]),
    "a field of the map": (
        ["data.fields={promt: prompt}"],
        ["data.train: the field map has no field 'promt'; did you mean 'prompt'?"],
    ),
    "a column": (["data.fields={prompt: question}"], ["data.train: tasks.jsonl, line 1: there is no field 'question'"]),
    "an option of a data set": (
        ["data.train={path: tasks.jsonl, feilds: {prompt: prompt}}"],
        ["data.train: the data set ", "has no option 'feilds'; did you mean 'fields'?"],
    ),
    "an option of a part": (
        ["verifier={name: combine, parts: [math, {name: exact, wight: 2}]}"],
        ["verifier: verifier 'combine': parts[1]: verifier 'exact' has no option 'wight'; did you mean 'weight'?"],
    ),
    "a range": (
        ["optim.optimizer={name: adamw, betas: [0.9, 1.5]}"],
        ["optim.optimizer: optimizer 'adamw': betas[1]=1.5: it must be less than 1"],
    ),
    "a later stage": (
        ["stages=[{kind: sft, steps: 1}, {kind: grpo, steps: 1, data: {train: none.jsonl}}]"],
        ["stage 2 (grpo): data.train: there is no data at 'none.jsonl'"],
    ),
    "a verifier's constructor": (
        ["verifier={name: combine, parts: [exact, {name: math, weight: half}]}"],
        ["verifier: combine: the weight of 'math' is 'half', not a finite number"],
    ),
    "a template": (["data.template={systm: x}"], ["data.template: a template has no key 'systm'"]),
    "no demonstrations": (
        ["stages=[{kind: sft, steps: 1, data: {train: [{prompt: a, answer: b}]}}]"],
        ["stage 'sft': tasks[0], task ", "has no demonstration to learn from"],
    ),
    "rows in the configuration": (["data.train=[{promt: a}]"], ["data.train: tasks[0]: there is no field 'prompt'"]),
    "no data set": (["data.train=3"], ["data.train: a data set is a path, a hub name, a source", "not int"]),
    "an own source": (["data.train={name: arithmetic, count: 0}"], ["data.train: "]),
    "a place of a message": (
        ["stages=[{kind: grpo, steps: 1}]", "stages[0].optim.lr=-1"],
        ["stages[0].optim.lr: it must be greater than"],
    ),
    "no verifier": (["verifier=null"], ["names no verifier and the config sets none"]),
    "a verifier of a task": (
        ["verifier=null", "data.train=[{prompt: '1', answer: '1', verifier: mth}]"],
        ["there is no verifier 'mth'; did you mean 'math'?"],
    ),
    "a task that cannot be verified": (
        ["verifier=math", "data.train=[{prompt: a}]"],
        ["1 task cannot be verified; correct or remove:", "tasks[0]"],
    ),
    "a group, where tasks are not read": (
        ["rollout.group_size=1", "data.train=openai/gsm8k/main:train"],
        ["rollout.group_size is 1, and the advantage 'group' compares"],
    ),
    "data of a source": (["data.train={name: preferences, data: {pth: x}}"], ["data.train: the data set", "'pth'"]),
    "a part that is none": (
        ["verifier={name: combine, parts: [exact, 3]}"],
        ["verifier 'combine': parts[1]=3: a part is a verifier"],
    ),
    "a device of a frozen model": (
        ["models={j: {path: /nope, device: cpuu}}"],
        ["models.j.device 'cpuu' is no device"],
    ),
    "a device": (["model.device=cpuu"], ["model.device 'cpuu' is no device"]),
}


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize("case", WITHOUT_LOADING)
def test_what_needs_no_model_is_refused_before_one_is_loaded(command, tmp_path, monkeypatch, case, dry):
    monkeypatch.chdir(tmp_path)
    arguments, said = WITHOUT_LOADING[case]
    over = {"model": {"scratch": None, "path": str(tmp_path / "no-model")}, "data": {"train": "tasks.jsonl"}}
    code, out, err = command(*dry, *arguments, over=over)
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1
    for part in said:
        assert part in err


OF_THE_USER = """
from dataclasses import dataclass

from rlvr.components import Advantage, RewardTerm
from rlvr.errors import ConfigError
from rlvr.verifiers import Verifier
from rlvr import Verdict

BUILT = []


@dataclass
class Short(RewardTerm):
    check: bool = True

    def __call__(self, batch, **given):
        return [float(len(rollout.text) < 4) for rollout in batch.rollouts]


class Broken(Short):
    def check_config(self, config):
        return config.nothing


@dataclass
class Level(Advantage):
    def check(self, config, tasks):
        if max(len(task.prompt) for task in tasks) > 4:
            raise ConfigError("a prompt is too long for the level")

    def __call__(self, batch):
        return batch.column("reward")


class Heavy(Verifier):
    def __init__(self):
        BUILT.append(1)

    def verify(self, task, completion):
        return Verdict.from_score(float(completion.startswith("1")))
"""


def test_the_checks_of_users_components_are_called_as_their_contracts_say(command, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OF_THE_USER)
    over = {"run": {"steps": 1}, "rewards": ["verdict", {"name": f"{file}:Short", "weight": 0.5}]}
    over |= {"algorithm": {"advantage": f"{file}:Level"}, "verifier": f"{file}:Heavy"}
    assert command("--dry-run", over=over)[0] == 0
    loaded = [module for name, module in sys.modules.items() if name.startswith("rlvr_file_mine")]
    (built,) = (module.BUILT for module in loaded if module.__file__ == str(file))
    assert len(built) == 1
    assert command(over=over, name="run")[0] == 0
    assert len(built) == 2  # once in a run
    code, _, err = command("--dry-run", f"rewards=[verdict, {file}:Broken]", over=over)
    assert code == 2 and "rewards: `check_config` of 'Broken' failed. What it raised:" in err and "nothing" in err
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "0123456789", "answer": "1"}\n')
    code, _, err = command("--dry-run", f"data.train={long}", over=over)
    assert (code, err) == (2, "error: a prompt is too long for the level\n")


def test_a_dry_run_for_other_machines_does_not_need_the_data(command):
    code, out, err = command("--dry-run", "--devices", "1x8GB", "data.train=none.jsonl")
    assert (code, err) == (0, "")
    assert "data.train: there is no data at 'none.jsonl'" in out
    code, out, err = command("--dry-run", "--devices", "1x8GB")
    assert "data.train: 6 tasks" in out


ROWS = {
    "not JSON": ('{"prompt": "a", "answer": "1"}\n{"prompt": \n', ["line 2", "not valid JSON"]),
    "no prompt": ('{"prompt": "a"}\n\n{"promt": "b"}\n', ["line 3", "'prompt'", "did you mean 'promt'"]),
    "an ill-typed field": ('{"prompt": "a"}\n{"prompt": "b", "info": [1]}\n', ["line 2", "'info'", "a list"]),
    "no object": ("[1]\n3\n", ["line 1"]),
    "ids twice": (
        '{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n',
        ["'x' is given twice", "line 1", "line 2"],
    ),
    "empty": ("", ["is empty"]),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_rows_are_named_by_file_line_and_field(command, tmp_path, case):
    text, output = ROWS[case]
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    code, _, err = command(f"data.train={path}")
    assert code == 2
    for part in [str(path), *output]:
        assert part in err


def test_gold_that_cannot_be_checked_is_refused_by_name(command, tmp_path):
    path = tmp_path / "gold.jsonl"
    rows = [{"id": "good", "prompt": "1=?", "answer": "1"}, {"id": "bad", "prompt": "2=?", "answer": "\\frac{1}{"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = command(f"data.train={path}", "verifier=math")
    assert code == 2
    assert "1 task cannot be verified" in err
    assert "  bad: " in err and f"({path}, line 2)\n" in err
    code, _, err = command(over={"data": {"eval": str(path)}, "verifier": "math"})
    assert code == 2
    assert "  bad: " in err and f"({path}, line 2)\n" in err


def test_functions_that_ask_for_what_tasks_lack_are_refused(command, tmp_path):
    (tmp_path / "asks.py").write_text("def check(completion, tests): return 1.0")
    code, _, err = command(f"verifier={tmp_path}/asks.py:check")
    assert code == 2
    assert "asks for 'tests'" in err and "tasks.jsonl, line 1)" in err


def test_tasks_without_demonstration_are_refused_in_an_sft_stage(command, tmp_path):
    path = tmp_path / "bare.jsonl"
    path.write_text('{"id": "bare", "prompt": "1=?", "answer": "1"}\n')
    code, _, err = command(f"data.train={path}", over={"stages": [{"kind": "sft", "steps": 1}]})
    assert code == 2
    assert f"stage 'sft': {path}, line 1, task 'bare' has no demonstration" in err


def test_long_prompts_are_left_out_on_request(command, folder, tmp_path):
    path = tmp_path / "long.jsonl"
    rows = [
        *task_rows(2),
        {"id": "long", "prompt": "1" * 80, "answer": "1"},
        {"id": "full", "prompt": "1" * 63, "answer": "1"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = command(f"data.train={path}")
    assert code == 2
    assert (
        f"{path}, line 3, task 'long': its prompt has 80 tokens, and 1 to 63 are possible, in a context of 64 (the "
        "smaller one of the model's and the engine's) (1 of 4 tasks are like that)" in err
    )
    code, out, err = command(
        f"data.train={path}", "data.skip_long_prompts=true", over={"logging": {"console": "plain"}}
    )
    assert (code, err) == (0, "")
    assert "1 tasks are left out" in out
    seen = {row["task"]["id"] for file in (folder / "rollouts").iterdir() for row in lines(file)}
    assert seen == {"t0", "t1", "full"}  # 63 tokens leave room for one


def test_long_evaluation_prompts_are_refused_before_training(command, folder, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "long", "prompt": "1" * 80, "answer": "1"}) + "\n")
    over = {"data": {"eval": str(path)}, "evaluation": {"at_start": False}}
    code, _, err = command(over=over)
    assert code == 2
    assert f"{path}, line 1, evaluation task 'long'" in err
    assert not folder.exists()


def test_configuration_files_that_cannot_be_read(tmp_path, capsys):
    for text, said in [
        (None, "there is no config file"),
        ("run: [", "is not YAML"),
        ("rnu: {}", "rnu: unknown key; did you mean 'run'?"),
    ]:
        path = tmp_path / f"{said[:3]}.yaml"
        if text is not None:
            path.write_text(text)
        assert train.main(["--config", str(path)]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err


def test_a_second_ctrl_c_stops_at_once(command, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlvr.trainer.GRPOTrainer.train", interrupted)
    code, _, err = command()
    assert code == 130
    assert err == "stopped at once\n"


@pytest.mark.gate
def test_a_folder_with_metrics_is_kept_unless_overwrite_is_asked_for(command, folder, monkeypatch):
    assert command()[0] == 0
    before = (folder / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        # The refusals are known before a model is loaded, which takes minutes for a large one.
        patch.setattr("rlvr.trainer.GRPOTrainer", None)
        code, _, err = command("run.seed=1")
        assert code == 2
        missing, _, why = command("--resume", str(folder / "nowhere"))
        assert missing == 2 and f"there is no run or checkpoint {folder / 'nowhere'}" in why
        (folder / "checkpoints").rename(folder / "kept")
        lost, _, why = command("--resume", "auto")
        assert lost == 2 and "no checkpoint to go on from: they would be lost" in why
        (folder / "kept").rename(folder / "checkpoints")
    for part in (str(folder), "--resume auto", "run.name", "run.overwrite=true"):
        assert part in err
    assert (folder / "metrics.jsonl").read_bytes() == before
    (folder / "checkpoints" / "step-99").mkdir()
    assert command("run.seed=1", "run.overwrite=true", "run.steps=2")[0] == 0
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-2"]


# what needs a process of its own


@pytest.mark.slow
def test_interrupted_runs_end_well_and_go_on_to_the_same_end(tmp_path, make_tree, pieces):
    """Ctrl-C and SIGTERM while a step is sampled: exit codes 130 and 143, a checkpoint of the last whole step."""
    over = {
        "run": {"steps": 8},
        "verifier": f"{pieces}:slow",
        "rollout": {"group_size": 2},
        "logging": {"console": "plain"},
    }
    for name in ("whole", "cut"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(make_tree(over, name)))
    whole = start(tmp_path / "whole.yaml")
    metrics = tmp_path / "runs" / "cut" / "metrics.jsonl"
    for sent, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(tmp_path / "cut.yaml", "--resume", "auto")
        before = len(lines(metrics)) if metrics.exists() else 0
        deadline = time.monotonic() + 60
        while (len(lines(metrics)) if metrics.exists() else 0) < before + 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.05)
        process.send_signal(sent)
        out, err = process.communicate(timeout=30)
        assert process.returncode == code, out + err
        assert "Traceback" not in err
        step = lines(metrics)[-1]["step"]
        assert before + 2 <= step < 8
        assert (metrics.parent / "checkpoints" / f"step-{step}" / "complete.json").exists()
    assert train.main(["--config", str(tmp_path / "cut.yaml"), "--resume", "auto", "logging.console=off"]) == 0
    out, err = whole.communicate(timeout=60)
    assert whole.returncode == 0, out + err
    assert timeless(lines(metrics)) == timeless(lines(tmp_path / "runs" / "whole" / "metrics.jsonl"))


HANGS = """
import runpy, time
import rlvr.train

def hangs_here():
    print("ready", flush=True)
    time.sleep(600)

rlvr.train.main = hangs_here
runpy.run_module("rlvr.train", run_name="__main__", alter_sys=True)
"""


def test_the_command_writes_its_stacks_when_it_is_asked_and_when_it_crashes(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=file)
    try:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR2)
        until(lambda: "in hangs_here" in log.read_text(), 30, "the stacks")
        assert process.poll() is None and "Fatal" not in log.read_text()
        process.send_signal(signal.SIGSEGV)
        assert process.wait(30) == -signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_importing_the_library_takes_nothing_that_is_slow():
    program = "import sys; import rlvr; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "pydantic", "numpy"} & set(done.stdout.split())


@pytest.mark.gate
def test_a_run_that_saves_imports_no_deepspeed(tmp_path, make_tree):
    """Which takes seconds and 100 MB, and is of no use to it."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_tree({"run": {"steps": 1}})))
    program = (
        "import sys; from rlvr import train; code = train.main(sys.argv[1:]); print(code, 'deepspeed' in sys.modules)"
    )
    arguments = ["--config", str(tmp_path / "run.yaml")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-2:] == ["0", "False"], done.stderr
    assert list((tmp_path / "runs" / "run").rglob("model.safetensors"))


def test_all_public_names_resolve():
    import rlvr

    for name in rlvr.__all__:
        assert getattr(rlvr, name) is not None
    with pytest.raises(AttributeError, match="No rlvr attribute Nonsense"):
        _ = rlvr.Nonsense
