"""docs/verifiers.md: its samples run and judge as the page says, its tables are what the code has."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from rlvr import registry
from rlvr.records import Task
from rlvr.verifiers import MathVerifier, VerifierPool, as_verifier
from rlvr.verifiers.audit.tricks import TRICKS

BLOCK = re.compile(r"^```(python|yaml|bash)\n(?:# ([\w.]+)\n)?(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs/verifiers.md").read_text(encoding="utf-8")


@pytest.fixture
def blocks(page, tmp_path, monkeypatch):
    """(kind, name) -> text; the Python files lie in the working directory."""
    result = {(kind, name): text for kind, name, text in BLOCK.findall(page)}
    for (kind, name), text in result.items():
        if kind == "python":
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return result


SAMPLES = {
    "even.py": [("12", None, None, 1.0), ("7", None, None, 0.0)],
    "near.py": [("3", 3.0, None, 1.0), ("4", 3.0, None, 0.5), ("x", 3.0, None, 0.0), ("3", None, None, None)],
    "from_trl.py": [("3", "3", None, 1.0), ("4", "3", None, 0.0)],
    "weighted": [("oslo", "Oslo", None, 0.8), ("Oslo.", "Oslo", None, 0.2), ("Rome", "Oslo", None, 0.0)],
    "gated": [
        ("<think>x</think><answer>Oslo</answer>", "Oslo", None, 1.0),
        ("<think>x</think><answer>Rome</answer>", "Oslo", None, 0.0),
        ("<answer>Oslo</answer>", "Oslo", None, 0.0),
    ],
    "routed": [
        (r"\boxed{0.5}", "1/2", "sums", 1.0),
        ("oslo", "Oslo", "capitals", 1.0),
        ("oslo", "Oslo", "sums", 0.0),
        ("the Oslo", "Oslo", "elsewhere", 1.0),
    ],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_judges_as_the_page_says(blocks, name):
    verifier = as_verifier(yaml.safe_load(blocks["yaml", name])["verifier"])
    tasks = [Task("1", "?", answer, source=source) for _, answer, source, _ in SAMPLES[name]]
    assert [verifier.check_task(task) for task in tasks if task.answer is not None] == [
        None for task in tasks if task.answer is not None
    ]
    with VerifierPool(workers=2) as pool:
        pairs = [(task, row[0]) for task, row in zip(tasks, SAMPLES[name], strict=True)]
        assert [verdict.score for verdict in pool.verify_many(verifier, pairs)] == [row[-1] for row in SAMPLES[name]]


def test_every_sample_of_the_page_is_tried(blocks):
    assert {name for kind, name in blocks if kind == "yaml"} == {*SAMPLES, "by_name"}
    assert {name for kind, name in blocks if kind == "python"} == {*SAMPLES, *PROGRAMS} - {
        "weighted",
        "gated",
        "routed",
    }


def test_verdicts_by_name_are_what_the_terms_read(blocks, make_trainer):
    trainer = make_trainer(yaml.safe_load(blocks["yaml", "by_name"]))
    trainer.train(1)
    verdicts = [rollout.verdicts for rollout in trainer.batch.rollouts]
    assert {tuple(of_one) for of_one in verdicts} == {("ExactVerifier", "overlap", "form")}
    expected = [v["overlap"].score if v["form"].score == 1 else 0.0 for v in verdicts]
    assert trainer.batch.columns["reward"].tolist() == expected


def test_a_verifier_takes_ten_lines(blocks):
    assert len([line for line in blocks["python", "even.py"].splitlines() if line.strip()]) <= 10


PROGRAMS = {"pool.py": "[1.0, 0.0]", "reward_for_trl.py": "[1.0]", "reward_for_verl.py": "1.0"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_page_runs(blocks, name):
    done = subprocess.run([sys.executable, name], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (PROGRAMS[name], "")


def test_the_examples_of_the_rules_are_judged_as_the_page_says(page):
    rules = page.split("## The rules of math")[1].split("\n## ")[0]
    tried = 0
    columns: list[str] = []
    for row in re.findall(r"^\| (.+) \|$", rules, re.MULTILINE):
        if row.startswith(("gold", "prompt")):
            columns = row.split(" | ")
            continue
        cells = dict(zip(columns, (cell.strip() for cell in re.split(r" \| ?(?= )", row)), strict=True))
        gold, right, wrong = cells["gold"], cells["right"], cells["wrong"]
        question = cells.get("prompt", cells.get("problem", "")).replace("`", "") or "What is it?"
        for cell, score in ((right, 1.0), (wrong, 0.0)):
            for example in re.split(r"; (?=`)", cell.strip()):
                answer = re.match(r"`(.+?)`(?: where the problem speaks of `(.+)`)?(?: \(.+\))?$", example)
                assert answer is not None, example
                task = Task("t", f"Say it with {answer[2]}." if answer[2] else question, gold.strip("`"))
                assert MathVerifier().verify(task, rf"\boxed{{{answer[1]}}}").score == score, (row, answer[0])
                tried += 1
    assert tried >= 30


def test_the_commands_are_commands(blocks, page):
    from rlvr.audit import make_parser

    commands = re.findall(r"^python -m rlvr\.audit (.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert make_parser().parse_intermixed_args(command.split()).verifier


def test_the_tables_list_every_verifier_and_every_trick(page):
    builtin = page.split("## Built-in verifiers")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", builtin, re.MULTILINE)) == set(registry.names("verifier"))
    tricks = page.split("## Tricks")[1].split("## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| (refuse|survive)s \|$", tricks, re.MULTILINE)
    assert rows == [(trick.name, trick.tries, trick.must) for trick in TRICKS]
