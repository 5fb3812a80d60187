"""python -m rlvr.evaluate on a tiny model: the same figures as the trainer's own evaluation, and bad input."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr.config.config_loading import load_config
from rlvr.distributed import World
from rlvr.distributed.checkpoint import Manifest
from rlvr.errors import ConfigError
from rlvr.evaluate import main
from rlvr.evaluate.model_evaluation import Part, _run_folder, sampler
from rlvr.records import Task

TASKS = [{"prompt": f"{k}+{k}=", "answer": str(k % 4), "id": f"t{k}", "level": 1 + k % 2} for k in range(6)]
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
    for step in (3, 12):
        (path / f"run/checkpoints/step-{step}/complete.json").write_text(Manifest(step, 1, {}, {}, {}).text())
    (path / "run/checkpoints/step-20/model").mkdir(parents=True)  # torn
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
    assert got["by_difficulty"] == {} and got["results"]["answer_entropy"] == got["answer_entropy"]


@pytest.mark.parametrize("scorer", ["likelihood", "self_certainty"])
def test_the_best_of_k_by_the_policys_own_judgement(run, scorer):
    code, got, err = run("--samples", "6", "--k", "1,3,6", "--scorer", scorer, "evaluation.difficulty=level")
    assert code == 0 and got is not None, err
    results = got["results"]
    assert got["scorer"] == scorer and "best@1" not in results
    assert results["best@6"] <= results["pass@6"] + 1e-12 and results["best@3"] <= results["pass@3"] + 1e-12
    low, high = results["best@3 interval"]
    assert low <= results["best@3"] <= high
    assert set(got["by_difficulty"]) == {"1", "2"} and got["by_difficulty"]["2"]["tasks"] == 3


def test_the_trainer_keeps_each_evaluation_by_task(folder, tmp_path):
    from rlvr.evaluation import compare, read_result
    from rlvr.trainer import GRPOTrainer

    config = {
        "run": {"dir": str(tmp_path), "name": "mine", "steps": 2},
        "rollout": {"max_new_tokens": 6, "prompts_per_step": 2, "group_size": 2},
        "evaluation": {"samples": 4, "k": [1, 4], "scorer": "likelihood", "every": 1},
        "logging": {"console": "off", "rollouts": 0},
    }
    tasks = str(folder / "tasks.jsonl")
    with GRPOTrainer(str(folder / "model"), tasks, f"{folder / 'even.py'}:even", config, eval_tasks=tasks) as trainer:
        rows = trainer.train()
    files = sorted((tmp_path / "mine" / "evaluations").iterdir())
    assert [file.name for file in files] == ["step-000000.json", "step-000001.json", "step-000002.json"]
    task_results = read_result(files[2])
    assert [t.id for t in task_results] == [task["id"] for task in TASKS]
    assert sum(t.best[4] for t in task_results) / 6 == rows[-1]["eval/best@4"]
    assert compare(read_result(files[0]), task_results, [1, 4])["tasks"] == 6


@pytest.mark.gate
def test_two_ranks_find_what_one_process_finds(run, folder, tmp_path):
    output = tmp_path / "both.json"
    code, alone, _ = run("--samples", "4", "--k", "1,4", "--seed", "5")
    assert code == 0 and alone is not None
    arguments = ["--model", str(folder / "model"), "--data", str(folder / "tasks.jsonl"), "--max-new-tokens", "6"]
    arguments += ["--verifier", f"{folder / 'even.py'}:even", "--samples", "4", "--k", "1,4", "--seed", "5"]
    ended = on_ranks(2, "-m", "rlvr.evaluate", *arguments, "--output", str(output), "model.device=cpu")
    assert [code for code, _ in ended] == [0, 0], ended
    both = json.loads(output.read_text())
    assert both["ranks"] == 2 and alone["ranks"] == 1
    for key in ("results", "by_source", "by_task", "samples", "k"):
        assert both[key] == alone[key]
    assert "evaluation: 6 tasks" in ended[0][1] and "tasks" not in ended[1][1]  # rank 0 alone speaks and writes


@pytest.mark.slow
def test_what_one_rank_refuses_ends_all(folder, tmp_path):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "1+1=" * 40, "answer": "2"}) + "\n")
    arguments = ["--model", str(folder / "model"), "--data", str(tmp_path / "tasks.jsonl"), "--samples", "1"]
    ended = on_ranks(2, "-m", "rlvr.evaluate", *arguments, "--verifier", "math", "model.device=cpu")
    assert all(code in (1, 2) for code, _ in ended), ended
    assert "leaves none for a response" in ended[0][1]


def on_ranks(ranks: int, *arguments: str) -> list[tuple[int, str]]:
    """(exit code, what it said) of each rank, as a launcher would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**common, "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=180)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_run_means_its_newest_whole_checkpoint(run, folder, tmp_path, monkeypatch):
    for output in (tmp_path, tmp_path / "file" / "out.json"):
        (tmp_path / "file").write_text("mine")
        code, _, error = run("--output", str(output))
        assert code == 2 and str(output) in error and "tasks, " not in error  # before anything is sampled
    code, got, _ = run("--samples", "1", model="run")
    assert code == 0 and got is not None and got["model"].endswith("step-12/model")
    code, got, _ = run("--samples", "1", model="run/checkpoints/step-3")
    assert code == 0 and got is not None and got["model"].endswith("step-3/model")
    monkeypatch.chdir(folder / "run" / "checkpoints")
    (folder / "run" / "config.yaml").write_text("run: {}\n")
    (tmp_path / "link").symlink_to(folder / "run" / "checkpoints" / "step-3")
    assert {_run_folder(name) for name in ("step-3", str(tmp_path / "link"), "step-3/model")} == {folder / "run"}
    (folder / "run" / "config.yaml").unlink()


def test_the_pages_first_command_works_with_the_runs_own_configuration(folder, tmp_path, monkeypatch, capsys):
    """As written in docs/evaluation.md: the verifier, template and lengths are the run's, the figures its own
    evaluation's."""
    from rlvr.trainer import GRPOTrainer

    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    written = shlex.split(page.split("```bash\n")[1].split("\n")[0])
    assert written[:3] == ["python", "-m", "rlvr.evaluate"]
    monkeypatch.chdir(tmp_path)
    rows = (folder / "tasks.jsonl").read_text()
    (tmp_path / "held_out.jsonl").write_text(rows)
    config = {
        "run": {"dir": "runs", "name": "quickstart", "seed": 3, "steps": 1},
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": str(folder / "tasks.jsonl"), "eval": "held_out.jsonl", "template": {"text": "{prompt} "}},
        "verifier": f"{folder / 'even.py'}:even",
        "rollout": {"max_new_tokens": 6, "prompts_per_step": 2, "group_size": 2},
        "evaluation": {"samples": 64, "k": [1, 8, 64]},
        "logging": {"console": "off"},
    }
    with GRPOTrainer(config=config) as trainer:
        trainer.train()
        expected = trainer.evaluations[-1]
    assert main(written[3:]) == 0
    got = json.loads((tmp_path / "after.json").read_text())["results"]
    printed = capsys.readouterr().err
    for name in ("greedy", "mean", "pass@8", "length_mean"):
        assert got[name] == expected[f"eval/{name}"], name
        shown = f"{got[name]:.4g}" if name == "length_mean" else f"{100 * got[name]:.1f} %"
        assert f"{name}  {shown}" in printed
    Path("config.yaml").write_text("of: another program\n")
    asked = ["--model", "runs/quickstart/checkpoints/step-1/model", "--samples", "2", "--no-greedy"]
    assert main([*asked, "--max-new-tokens", "2", "--output", "less.json"]) == 0  # without --data; an option goes first
    less = json.loads((tmp_path / "less.json").read_text())
    assert len(less["by_task"]) == len(TASKS) and less["results"]["length_mean"] <= 2


def test_compare_and_contamination(run, folder, tmp_path):
    output = tmp_path / "deep" / "first.json"
    assert run("--samples", "4", "--output", str(output))[:2] == (0, None)
    code, got, err = run("--samples", "4", "--compare", str(output), "--contamination", str(folder / "tasks.jsonl"))
    assert code == 0 and got is not None
    # Numbers for a reader are beside the JSON, which goes to standard output here.
    shown = f"{100 * got['results']['pass@4']:.1f} %"
    assert f"pass@4  {shown}  (95 %: " in err and "compared on 6 tasks:" in err
    assert f"  pass@4: {shown} -> {shown} (+0.0 points; 95 %: +0.0 to +0.0)" in err
    assert "contamination: 6 of 6 tasks share 13 consecutive words" in err
    same = got["comparison"]["differences"]["mean"]
    assert (same["difference"], same["interval"], same["tasks"]) == (0.0, [0.0, 0.0], 6)
    support = got["comparison"]["support"]
    assert support["gained"] == support["lost"] == 0 and support["both"] + support["neither"] == 6
    assert got["contamination"]["share"] == 1.0
    assert not list(tmp_path.rglob("*.partial"))


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROBLEMS = {
    "math-500": [{"problem": f"What is {k} + {k}?", "answer": str(2 * k), "level": k} for k in range(3)],
    "gsm8k": [{"question": f"{k} pens and {k} more?", "answer": f"It is {2 * k}.\n#### {2 * k}"} for k in range(2)],
}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model whose tokenizer has a chat template, and a file of rows for each of two benchmarks."""
    from rlvr.config import ModelConfig, ScratchConfig
    from rlvr.policy import load_policy

    path = tmp_path_factory.mktemp("chat")
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    scratch = ScratchConfig(hidden_size=16, layers=1, intermediate_size=16, context=512, alphabet=alphabet)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu"), 0)
    policy.tokenizer.chat_template = CHAT
    policy.model.save_pretrained(path / "model")
    policy.tokenizer.save_pretrained(path / "model")
    for name, rows in PROBLEMS.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_benchmarks_by_name_have_their_own_tasks_sampling_and_results(chat_model, tmp_path, capsys):
    names = [f"{name}={chat_model / name}.jsonl" for name in PROBLEMS]
    given = ["--model", str(chat_model / "model"), "--max-new-tokens", "4"]
    output = tmp_path / "both.json"
    assert main([*given, "--benchmark", ",".join(names), "--output", str(output)]) == 0
    printed = capsys.readouterr().err
    assert "math-500: 3 tasks, 3 responses" in printed and re.search(r"gsm8k +greedy  0\.0 %", printed)
    both = json.loads(output.read_text())["benchmarks"]
    assert list(both) == ["math-500", "gsm8k"]
    assert [task["id"] for task in both["gsm8k"]["by_task"]] == ["gsm8k/0", "gsm8k/1"]
    assert list(both["math-500"]["by_difficulty"]) == ["0", "1", "2"]
    # Greedy as published, not the eight samples that other data get.
    assert all(one["samples"] == 0 and one["results"]["tasks"] for one in both.values())
    assert both["gsm8k"]["benchmark"]["source"].startswith("QwenLM/Qwen2.5-Math@")
    # One of them again, with samples, against the earlier file, which the command replaces.
    samples = ["--samples", "2", "--k", "1,2", "evaluation.temperature=0.5", "--compare", str(output)]
    assert main([*given, "--benchmark", names[1], *samples, "--output", str(output)]) == 0
    one = json.loads(output.read_text())
    assert one["benchmark"]["name"] == "gsm8k" and one["sampling"]["temperature"] == 0.5
    assert one["comparison"]["differences"]["greedy"]["difference"] == 0.0
    assert one["results"]["pass@2 interval"] == [0.0, 0.0]


def test_each_benchmark_s_answers_are_held_to_its_own_length(chat_model, capsys):
    parts = []
    for name, longest in (("short", 4), ("long", 5000)):
        tree = {"model": {"path": str(chat_model / "model"), "device": "cpu"}, "verifier": "math"}
        config = load_config(tree | {"rollout": {"max_new_tokens": longest}})
        parts.append(Part(name, config, [Task(id=name, prompt="1 + 1", answer="2")]))
    with sampler(parts, World()):
        pass
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "leaves fewer" in line)
    assert "rollout.max_new_tokens=5000 for responses to 1 of 1 evaluation tasks" in warning


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--benchmark", "math500"], "no benchmark 'math500'; did you mean 'math-500'? (there are math-500, aime-2024"),
        (["--benchmark", "gsm8k={chat}/gsm8k.jsonl,gsm8k"], "the benchmark gsm8k is asked for twice"),
        (["--benchmark", "gsm8k", "--data", "tasks.jsonl"], "give it or --data, not both"),
        (["--benchmark", "gsm8k=nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["--benchmark", "math-500={chat}/gsm8k.jsonl"],
            "gsm8k.jsonl, line 1: there is no column 'problem', which",
        ),
    ],
)
def test_bad_benchmarks_are_named(chat_model, arguments, said, capsys):
    arguments = [word.replace("{chat}", str(chat_model)) for word in arguments]
    assert main(["--model", str(chat_model / "model"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


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
        (["--model", "no/such/folder"], "no/such/folder (no such folder; a hub name"),
        (["--model", __file__], "there is no model in"),
        (["runs/mine"], "'runs/mine' is not of the form key.path=value\n"),
        ([__file__], "key.path=value (a file or folder is the value of an option: see --help)"),
        (["rollout.max_new_token=3"], "max_new_tokens"),
        (["--engine", "hff"], "did you mean 'hf'"),
        (["--scorer", "likelyhood"], "did you mean 'likelihood'"),
        (["--contamination", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_named(run, arguments, said):
    code, _, err = run(*arguments)
    assert code == 2 and said in err and "Traceback" not in err


def test_a_model_that_brings_no_tasks_is_named(tmp_path, capsys):
    assert main(["--model", "runs/mine"]) == 2
    assert "there is no folder runs/mine here" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("run: {}\n")
    assert main(["--model", str(tmp_path), "--data", "tasks.jsonl"]) == 2
    assert "has no whole checkpoint yet" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_printed(tmp_path, capsys, monkeypatch):
    from rlvr.evaluate import result_file

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_file, "write_whole", full)
    with pytest.raises(ConfigError, match=r"out\.json' cannot be written: .*No space.* printed to standard output"):
        result_file.write_result({"version": 1}, str(tmp_path / "out.json"), [])
    assert json.loads(capsys.readouterr().out) == {"version": 1}


def test_a_result_that_is_none_is_refused(run, tmp_path):
    (tmp_path / "other.json").write_text('{"by_task": [{"of": "another"}]}')
    code, _, err = run("--compare", str(tmp_path / "other.json"))
    assert code == 2 and "is no result" in err


KINDS = """
from rlvr import Verdict, Verifier

class Strict(Verifier):
    def verify(self, task, completion):
        return Verdict.from_score(float("1" in completion), answer=completion)

class Loose(Strict):
    def same_answer(self, first, second):
        return True
"""


def test_answers_of_a_mixed_set_are_told_apart_by_each_tasks_own_verifier(folder, tmp_path):
    """Whichever task stands first, in the trainer and in the command; of a routed combination the task's part
    decides."""
    from rlvr.evaluation import read_result
    from rlvr.trainer import GRPOTrainer

    (tmp_path / "kinds.py").write_text(KINDS)
    strict, loose = f"{tmp_path / 'kinds.py'}:Strict", f"{tmp_path / 'kinds.py'}:Loose"
    rows = [{**TASKS[0], "verifier": strict, "source": "s"}, {**TASKS[1], "verifier": loose, "source": "l"}]
    config = {
        "run": {"dir": str(tmp_path), "steps": 1},
        "rollout": {"max_new_tokens": 6, "prompts_per_step": 1, "group_size": 2},
        "evaluation": {"samples": 6, "k": [6], "greedy": False, "at_end": False},
        "logging": {"console": "off", "rollouts": 0},
    }
    routed = {"name": "combine", "how": "routed", "parts": {"s": strict, "l": loose}}
    for number, (order, verifier) in enumerate([(rows, None), (rows[::-1], None), (rows, routed)]):
        data = tmp_path / f"tasks{number}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in order))
        tree = {**config, "run": {**config["run"], "name": f"run{number}"}, "verifier": verifier}
        with GRPOTrainer(str(folder / "model"), str(data), None, tree, eval_tasks=str(data)) as trainer:
            trainer.train()
        (file,) = (tmp_path / f"run{number}" / "evaluations").iterdir()
        options = ["verifier=" + json.dumps(verifier)] if verifier else []
        given = ["--model", str(folder / "model"), "--data", str(data), "--output", str(tmp_path / "out.json")]
        assert main([*given, "--samples", "6", "--k", "6", "--max-new-tokens", "6", "--no-greedy", *options]) == 0
        for task_results in (read_result(file), read_result(tmp_path / "out.json")):
            entropy = {result.source: result.answer_entropy for result in task_results}
            assert entropy["l"] == 0.0 < entropy["s"], (number, entropy)


SOME = """
def last(completion, answer):
    if answer == "bad":
        raise ValueError("gold cannot be read")
    return 1.0
"""


def test_one_bad_task_ends_no_evaluation_and_a_broken_verifier_ends_it_before_the_samples(
    folder, tmp_path, capsys, monkeypatch
):
    """The bad task is alone in its block; the result is written, and a warning has the user's lines."""
    from rlvr.trainer import GRPOTrainer

    monkeypatch.setattr(
        sys.modules["rlvr.evaluation.evaluation_loop"], "BLOCK", 4
    )  # the package's `evaluate` is the function
    (tmp_path / "some.py").write_text(SOME)
    verifier = f"{tmp_path / 'some.py'}:last"
    output = tmp_path / "result.json"

    def evaluated(*answers):
        rows = [{"id": f"t{n}", "prompt": f"{n}=?", "answer": answer} for n, answer in enumerate(answers)]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["--model", str(folder / "model"), "--data", str(tmp_path / "tasks.jsonl"), "--verifier", verifier]
        return main([*given, "--samples", "2", "--max-new-tokens", "2", "--output", str(output)])

    assert evaluated("x", "x", "x", "x", "bad") == 0
    printed = capsys.readouterr().err
    assert json.loads(output.read_text())["results"]["undecided"] == pytest.approx(1 / 5)
    assert "warning: the verifier 'last' failed on 3 of 15 answers" in printed and "gold cannot be read" in printed
    config = {
        "run": {"dir": str(tmp_path), "steps": 1},
        "rollout": {"max_new_tokens": 2, "prompts_per_step": 1, "group_size": 2},
        "evaluation": {"samples": 4, "k": [1], "at_start": True, "at_end": False},
        "logging": {"console": "off", "rollouts": 0},
    }
    data = str(tmp_path / "tasks.jsonl")
    with GRPOTrainer(
        str(folder / "model"), [{"prompt": "1=?", "answer": "x"}], verifier, config, eval_tasks=data
    ) as run:
        run.train()
        assert run.step == 1 and run.evaluations[0]["eval/undecided"] == pytest.approx(1 / 5)
    output.unlink()
    assert evaluated("bad", "bad", "bad") == 1
    printed = capsys.readouterr().err
    assert "error: the verifier 'last' failed on every answer of the evaluation (3). What it raised:" in printed
    assert "samples" not in printed and "train" not in printed.split("What it raised")[0]
    assert not output.exists()
