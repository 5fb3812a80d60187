"""python -m rlvr.evaluate on labelled rows: judges, reward models, scorers of steps, rules, functions, bad input."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlvr.evaluate import main
from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.verifiers import as_verifier

PAIRS = [
    {"id": "a", "prompt": "Write.", "chosen": "a long text", "rejected": "short", "subset": "x"},
    {"id": "b", "prompt": "Write.", "chosen": "ab", "rejected": "abcdef", "subset": "x"},
    {"id": "c", "prompt": "Write.", "chosen": "abcd", "rejected": "abc", "subset": "y"},
]
LENGTH = """
def length(completion):
    return float(len(completion))

def broken(completion):
    raise KeyError("mine")
"""
SOLUTIONS = [
    {"id": "p0", "problem": "2+2?", "steps": ["fine", "bad one"], "label": 1, "final_answer_correct": False},
    {"id": "p1", "problem": "2+2?", "steps": ["fine", "fine"], "label": -1, "final_answer_correct": True},
    {"id": "p2", "problem": "2+2?", "steps": ["bad", "fine"], "label": -1, "final_answer_correct": True},
]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(name, rows)`: the name of a file with these rows in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length.py").write_text(LENGTH)

    def make(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    return make


@pytest.fixture
def run(write, capsys):
    """`run(*arguments)`: exit code, the written object (or None) and the errors."""

    def call(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out.strip() else None, err

    return call


def longer(request):
    first, second = (len(request.fenced[name]) for name in ("first", "second"))
    return request.verdict("A" if first > second else "B")


def judged(name, stub, *more):
    return ["--verifier", name, f"verifier.urls={stub.url}", "verifier.model=m", "verifier.hedge=null", *more]


def test_a_function_on_preferences_with_the_screen_and_the_file(run, write):
    arguments = ["--verifier", "length.py:length", "--preferences", write("pairs.jsonl", PAIRS)]
    code, got, _ = run(*arguments)
    assert code == 0 and got["rows"] == "preferences" and got["verifier"] == "length.py:length"
    assert got["results"]["accuracy"] == pytest.approx(2 / 3) and got["results"]["tasks"] == 3
    assert got["by_source"]["x"]["accuracy"] == 0.5 and got["mean_over_sources"]["accuracy"] == 0.75
    assert [(row["id"], row["chosen"], row["rejected"]) for row in got["by_task"]] == [
        ("a", [11.0], [5.0]), ("b", [2.0], [6.0]), ("c", [4.0], [3.0])
    ]  # fmt: skip
    code, printed, err = run(*arguments, "--output", "result.json")
    assert code == 0 and printed is None
    written = json.loads(Path("result.json").read_text())
    assert {**written, "seconds": 0} == {**got, "seconds": 0}
    assert re.search(r"accuracy  66\.7 %  \(95 %: 0\.0 to 100\.0 %\)", err)
    assert "x: accuracy 50.0 % of 2 rows" in err and "mean over 2 sources: accuracy 75.0 %" in err
    assert "of_all" not in err  # every row is decided


def test_a_judge_that_prefers_the_first_place_is_never_consistent(run, write):
    with StubJudge(lambda request: request.verdict("A")) as stub:
        code, got, _ = run(*judged("pairs", stub), "--preferences", write("pairs.jsonl", PAIRS))
        assert len(stub.requests) == 6  # each pair in both orders
    assert code == 0
    assert got["results"]["swap_consistency"] == 0 and got["results"]["ties"] == 1
    assert got["results"]["accuracy"] == 0.5


def test_a_judge_of_length_is_consistent_and_biased(run, write):
    with StubJudge(longer) as stub:
        code, got, _ = run(*judged("pairs", stub), "--preferences", write("pairs.jsonl", PAIRS), "--limit", "2")
    results = got["results"]
    assert code == 0 and results["tasks"] == 2 and results["swap_consistency"] == 1
    assert (results["accuracy_chosen_longer"], results["accuracy_chosen_shorter"]) == (1, 0)
    assert results["length_correlation"] == pytest.approx(1)


def test_replies_that_cannot_be_read_are_undecided_and_not_right(run, write):
    def sometimes(request):
        if "short" in request.text:
            return "I do not know."
        return longer(request)

    with StubJudge(sometimes) as stub:
        code, _, err = run(*judged("pairs", stub), "--preferences", write("pairs.jsonl", PAIRS), "--output", "r.json")
    results = json.loads(Path("r.json").read_text())["results"]
    assert code == 0 and results["undecided"] == pytest.approx(1 / 3)
    assert results["accuracy"] == 0.5 and results["accuracy_of_all"] == pytest.approx(1 / 3)
    assert "accuracy_of_all  33.3 %" in err


def test_a_judge_that_gives_no_verdict_at_all_is_one_line(run, write):
    with StubJudge("no verdict") as stub:
        code, got, err = run(*judged("pairs", stub), "--preferences", write("pairs.jsonl", PAIRS))
    assert code == 1 and got is None
    assert "error: the verifier decided no row of pairs. What it said first: unparsable: " in err


def test_a_reward_model_scores_as_the_verifier_does(run, write, make_folder, models):
    folder = make_folder("qwen3")
    rows = [{**row, "rejected": [row["rejected"], "another"]} for row in PAIRS]
    code, got, err = run(
        "--verifier", "scorer", "verifier.model=rm", f"models.rm.path={folder}", "models.rm.device=cpu",
        "--preferences", write("pairs.jsonl", rows),
    )  # fmt: skip
    assert code == 0, err
    verifier = as_verifier({"name": "scorer", "model": "rm"})
    verifier.attach(models(rm=folder))
    right = []
    for row, scored in zip(rows, got["by_task"], strict=True):
        texts = [row["chosen"], *row["rejected"]]
        verdicts = asyncio.run(verifier.verify_group(Task("1", row["prompt"]), texts))
        scores = [verdict.score for verdict in verdicts]
        assert scored["chosen"] + scored["rejected"] == pytest.approx(scores, abs=1e-5)
        right.append(sum(scores[0] > one for one in scores[1:]) / 2)
    assert got["results"]["accuracy"] == pytest.approx(sum(right) / 3)
    assert got["results"]["best_of_n"] == pytest.approx(sum(share == 1 for share in right) / 3)
    assert got["models"] == {"rm": str(folder)}


def test_a_scorer_of_steps_at_a_threshold(run, write, make_folder, models):
    folder = make_folder("qwen3", "tokens", num_labels=2)
    verifier = as_verifier({"name": "step_scorer", "model": "prm", "separator": "~"})
    verifier.attach(models(prm=folder))
    texts = ["\n\n".join(row["steps"]) for row in SOLUTIONS]
    verdicts = [asyncio.run(verifier.verify(Task("1", "2+2?"), text)) for text in texts]
    threshold = sorted(score for verdict in verdicts for *_, score in verdict.spans)[2]
    code, got, err = run(
        "--verifier", "step_scorer", "verifier.model=prm", 'verifier.separator="~"', f"models.prm.path={folder}",
        "models.prm.device=cpu", "--steps", write("solutions.jsonl", SOLUTIONS), "--threshold", f"{threshold + 1e-6}",
    )  # fmt: skip
    assert code == 0, err
    found = []
    for row, verdict, scored in zip(SOLUTIONS, verdicts, got["by_task"], strict=True):
        scores = [score for *_, score in verdict.spans]
        assert scored["steps"] == pytest.approx(scores, abs=1e-5)
        predicted = next((n for n, score in enumerate(scores) if score < threshold + 1e-6), -1)
        assert scored["prediction"] == predicted
        found.append(predicted == row["label"])
    assert got["results"]["error_accuracy"] == found[0]
    assert got["results"]["correct_accuracy"] == pytest.approx(sum(found[1:]) / 2)
    assert got["threshold"] == pytest.approx(threshold, abs=1e-5)


def test_a_judge_of_steps(run, write):
    def answer(request):
        steps = {name.removeprefix("step_"): text for name, text in request.fenced.items() if name.startswith("step_")}
        verdicts = {number: "wrong" if "bad" in text else "right" for number, text in steps.items()}
        return json.dumps({"code": request.code, "steps": verdicts})

    with StubJudge(answer) as stub:
        code, got, err = run(*judged("steps", stub), "--steps", write("solutions.jsonl", SOLUTIONS))
    results = got["results"]
    assert code == 0, err
    # p0 is found, p1 passes, p2 is rejected though its label says that all steps are right.
    assert (results["error_accuracy"], results["correct_accuracy"]) == (1, 0.5)
    assert results["f1"] == pytest.approx(2 * 0.5 / 1.5) and got["threshold"] == 0.5
    assert results["step_recall"] == 1 and results["step_precision"] == 0.5
    # before_error: 1/2, 1 and 0; right are the last two.
    assert results["outcome_auc"] == 0.5


def test_rules_on_labelled_responses(run, write):
    rows = [
        {"prompt": "1/2?", "answer": "0.5", "completion": r"\boxed{\frac12}", "expected": True, "source": "forms"},
        {"prompt": "1/2?", "answer": "0.5", "completion": "It is a half.", "expected": True, "source": "words"},
        {"prompt": "1/2?", "answer": "0.5", "completion": r"\boxed{2}", "expected": False, "source": "forms"},
    ]
    code, got, err = run("--verifier", "math", "--responses", write("answers.jsonl", rows))
    assert code == 0, err
    results = got["results"]
    assert (results["precision"], results["recall"], results["false_negative_rate"]) == (1, 0.5, 0.5)
    assert results["false_positive_rate"] == 0 and got["by_source"]["words"]["recall"] == 0
    assert [row["id"] for row in got["by_task"]] == ["answers/0", "answers/1", "answers/2"]


def test_several_sets_and_the_comparison_with_another_verifier(run, write):
    write("one.jsonl", PAIRS[:2])
    write("two.jsonl", PAIRS[2:])
    code, _, _ = run("--verifier", "length.py:length", "--preferences", "one.jsonl,two.jsonl", "--output", "a.json")
    assert code == 0 and set(json.loads(Path("a.json").read_text())["benchmarks"]) == {"one", "two"}
    with StubJudge(lambda request: request.verdict("A" if len(request.fenced["first"]) < 5 else "B")) as stub:
        arguments = [*judged("pairs", stub), "--preferences", "one.jsonl", "--preferences", "two.jsonl"]
        code, got, _ = run(*arguments, "--compare", "a.json")
    assert code == 0
    change = got["benchmarks"]["one"]["comparison"]["differences"]["accuracy"]
    # The function is right on a, the judge on b; on `a` it says B in both orders.
    assert change["before"] == 0.5 and change["difference"] == pytest.approx(change["after"] - 0.5)
    assert change["after"] == got["benchmarks"]["one"]["results"]["accuracy"] == 0.75


def test_a_configurations_verifiers_are_found_by_name(run, write, tmp_path):
    with StubJudge(longer) as stub:
        config = f"verifier: math\nverifiers:\n  better: {{name: pairs, urls: {stub.url}, model: m}}\n"
        (tmp_path / "config.yaml").write_text(config)
        arguments = ["--config", "config.yaml", "--verifier", "better", "--preferences", write("p.jsonl", PAIRS)]
        code, got, err = run(*arguments)
    assert code == 0, err
    assert got["results"]["accuracy"] == pytest.approx(2 / 3) and got["verifier"]["name"] == "pairs"


def test_columns_of_other_names_are_mapped(run, write):
    rows = [{"ask": "?", "good": "long", "bad": "s"}]
    mapped = "data.fields={prompt: ask, chosen: good, rejected: bad}"
    code, got, _ = run("--verifier", "length.py:length", "--preferences", write("p.jsonl", rows), mapped)
    assert code == 0 and got["results"]["accuracy"] == 1
    code, _, err = run("--verifier", "length.py:length", "--preferences", "p.jsonl", "data.fields={chosen: best}")
    assert code == 2 and "there is no field 'best', which data.fields gives for 'chosen'" in err


def test_the_policys_own_verdicts_and_those_of_a_frozen_model(run, write, make_policy, tmp_path):
    # So few tokens that both labels are among the likeliest 20.
    policy = make_policy(words=["yes", "no"], alphabet="Q?0123 ", context=2048)
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "?", "completion": str(n), "expected": bool(n % 2)} for n in range(4)]
    judge = (
        '{name: judge, backend: %s, read: probability, coded: false, labels: {"yes": 1, "no": 0}, least_mass: 1.0e-9, '
        "template: 'Q {prompt} {response}'}"
    )
    write("answers.jsonl", rows)
    own = ["--responses", "answers.jsonl", "--threshold", "0.5", "model.device=cpu", "--verifier"]
    code, asked, err = run(*own, judge % "policy", "--model", tmp_path / "model")
    assert code == 0, err
    code, frozen, err = run(*own, judge % "me", f"models.me.path={tmp_path / 'model'}", "models.me.device=cpu")
    assert code == 0, err
    scores = [[row["score"] for row in got["by_task"]] for got in (asked, frozen)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and all(0 < score < 1 for score in scores[0])
    code, _, err = run(*own, judge % "policy")
    assert code == 2 and "the verifier's `backend: policy` is the model of --model, which is not given" in err


REFUSED = [
    (["--preferences", "p.jsonl"], "there is no verifier to evaluate: give --verifier"),
    (["--verifier", "math", "--steps", "s.jsonl"], "--steps needs a verifier that scores steps"),
    (["--verifier", "math", "--preferences", "p.jsonl", "--steps", "s.jsonl"], "--preferences and --steps are two"),
    (["--verifier", "math", "--preferences", "p.jsonl", "--samples", "4"], "--samples is of the evaluation of a model"),
    (["--verifier", "math", "--preferences", "p.jsonl", "--no-greedy"], "--no-greedy is of the evaluation of a model"),
    (["--verifier", "math", "--preferences", "p.jsonl", "--threshold", "1"], "--threshold is for --steps and --resp"),
    (["--verifier", "math", "--preferences", "reward-benh"], "did you mean 'reward-bench'?"),
    (["--verifier", "math", "--preferences", "processbench"], "evaluate on it with --steps processbench"),
    (["--verifier", "math", "--preferences", "p.jsonl,p.jsonl"], "two sets of rows are called 'p'"),
    (["--verifier", "math", "--preferences", "none.jsonl"], "there is no data at 'none.jsonl'"),
    (["--verifier", "mth", "--preferences", "p.jsonl"], "did you mean 'math'?"),
    (["--verifier", "judge", "--preferences", "p.jsonl"], "urls"),
    (["--verifier", "scorer", "verifier.model=rm", "--preferences", "p.jsonl"], "models: there is no 'rm'"),
    (["--verifier", "length.py:broken", "--preferences", "p.jsonl"], "KeyError: 'mine'"),
    (["--verifier", "length.py:length", "--preferences", "p.jsonl", "--compare", "p.jsonl"], "is no result"),
    (["--verifier", "length.py:length", "--preferences", "p.jsonl", "--output", "p.jsonl"], "is not a result of rlvr"),
    (["--verifier", "length.py:length", "--responses", "p.jsonl"], "has no field 'completion'"),
    (["--verifier", "length.py:length", "--steps", "p.jsonl"], "field 'steps' (or 'completions') must be"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_input_is_one_line(run, write, arguments, message):
    write("p.jsonl", [{**row, "answer": "1"} for row in PAIRS])
    write("s.jsonl", [{**row, "answer": "1"} for row in SOLUTIONS])
    code, got, err = run(*arguments)
    assert (code, got) in ((2, None), (1, None))
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in err and (message in line or "KeyError" in message or "did you mean" in message)


@pytest.mark.slow
def test_an_interrupt_writes_nothing(write, tmp_path):
    with StubJudge(longer, hang=1.0) as stub:
        arguments = [*judged("pairs", stub), "--preferences", write("p.jsonl", PAIRS), "--output", "r.json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "rlvr.evaluate", *arguments], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
        )
        while not stub.hung:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert not (tmp_path / "r.json").exists()
