"""docs/judges.md: its samples judge and train with a scripted judge, its program runs, and its table of failures is
whole."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
from typing import get_args

import pytest
import yaml

from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.verifiers import as_verifier
from rlvr.verifiers.judge.chat_client import Cause

BLOCK = re.compile(r"^```(python|yaml)\n# ([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs/judges.md").read_text(encoding="utf-8")


@pytest.fixture
def blocks(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "a key")
    return {name: text for _, name, text in BLOCK.findall(page)}


def written(blocks, name, stub):
    """The configuration of the page, with the stub in the place of its servers."""
    return yaml.safe_load(re.sub(r"http://localhost:\d+/v1", stub.url, blocks[name]))


def test_the_judge_in_ten_lines(blocks):
    assert len(blocks["judge"].splitlines()) <= 10
    with StubJudge(lambda request: request.verdict("partly" if "5" in request.fenced["response"] else "yes")) as stub:
        verifier = as_verifier(written(blocks, "judge", stub)["verifier"])
        scores = [asyncio.run(verifier.verify(Task("1", "?", "4"), text)).score for text in ("4", "5", "4")]
        assert scores == [1, 0.5, 1]
        assert len(stub.requests) == 6 and stub.requests[0].key == "a key"  # three votes, and the third from the cache


def test_the_rubric_in_ten_lines_trains(blocks, make_trainer):
    assert len(blocks["rubric"].splitlines()) <= 10

    def answer(request):
        rude = len(request.fenced["response"]) % 2 == 0
        return json.dumps({"code": request.code, "met": {"1": True, "2": rude}})

    with StubJudge(answer) as stub:
        trainer = make_trainer(written(blocks, "rubric", stub))
        trainer.train(1)
    even = [float(len(rollout.text) % 2 == 0) for rollout in trainer.batch.rollouts]
    # Met the first, of 2 points of 2; the veto of the second makes it 0.
    assert trainer.batch.columns["reward/quality"].tolist() == [1 - one for one in even]


def test_the_pairs_train(blocks, make_trainer):
    def longer(request):
        return request.verdict("A" if len(request.fenced["first"]) > len(request.fenced["second"]) else "B")

    with StubJudge(longer) as stub:
        trainer = make_trainer(written(blocks, "pairs", stub))
        trainer.train(1)
    scores = [rollout.verdict.score for rollout in trainer.batch.rollouts if any(map(str.isdigit, rollout.text))]
    assert scores and all(score is None or 0 < score < 1 for score in scores)


def test_the_steps_train(blocks, make_trainer):
    def answer(request):
        numbers = [name.removeprefix("step_") for name in request.fenced if name.startswith("step_")]
        return json.dumps({"code": request.code, "steps": dict.fromkeys(numbers, "right")})

    with StubJudge(answer) as stub:
        trainer = make_trainer(written(blocks, "steps", stub))
        trainer.train(1)
    assert {rollout.verdict.score for rollout in trainer.batch.rollouts if rollout.text.strip()} == {1.0}
    assert all(rollout.verdict.spans for rollout in trainer.batch.rollouts if rollout.text.strip())


def test_the_reward_model_in_ten_lines_trains(blocks, make_folder, make_trainer):
    assert len(blocks["scorer"].splitlines()) <= 10
    tree = yaml.safe_load(blocks["scorer"])
    tree["models"]["rm"] = {"path": str(make_folder("qwen3")), "device": "cpu"}
    trainer = make_trainer(tree)
    trainer.train(1)
    for number, rollout in enumerate(trainer.batch.rollouts):
        verdict = rollout.verdicts["rm"]
        difference = verdict.scores["response"] - verdict.scores["reference"]
        assert verdict.score == pytest.approx(difference)
        paid = trainer.batch.columns["reward/bounded"][number]
        assert paid == pytest.approx(1 / (1 + math.exp(-difference)), abs=1e-5)


def test_the_policy_judges_itself(blocks, make_trainer):
    tree = yaml.safe_load(blocks["policy_judge"])
    # Of a policy that was never trained the labels have little of the probability.
    # Letters are among all characters, and would often not be among the likeliest 20 tokens.
    tree["verifiers"]["self"] |= {"least_mass": 1e-9, "coded": False}
    tree["model"] = {"scratch": {"context": 2048, "words": ["yes", "no"]}}
    trainer = make_trainer(tree)
    trainer.train(1)
    scores = [rollout.verdicts["self"].score for rollout in trainer.batch.rollouts]
    assert all(score is not None and 0 <= score <= 1 for score in scores)


@pytest.mark.slow
def test_the_program_runs(blocks, tmp_path):
    (tmp_path / "stub.py").write_text(blocks["stub.py"])
    done = subprocess.run([sys.executable, "stub.py"], capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout.split(), done.stderr) == (["1.0", "1"], "")


def test_a_judge_is_measured(blocks, page, tmp_path):
    (tmp_path / "measure.py").write_text(blocks["measure.py"])
    done = subprocess.run([sys.executable, "measure.py"], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == re.search(r"It prints `(.*)`", page)[1] == "0.5 1.0 0.0"


def test_every_sample_is_tried_and_every_cause_is_named(blocks, page):
    assert set(blocks) == {"judge", "rubric", "pairs", "steps", "scorer", "policy_judge", "measure.py", "stub.py"}
    assert set(re.findall(r"`verifier/NAME/undecided/(\w+)`", page)) == set(get_args(Cause))


def test_the_figures_are_those_of_the_files(root, page):
    for name, row in (("judge", "| 0.5 s |"), ("judge_short_steps", "| 0.2 s |")):
        result = json.loads((root / f"scripts/benchmarks/{name}.json").read_text())
        shown = next(line for line in page.splitlines() if line.startswith(row))
        figures = [100 * result["added_waiting"][f"staleness_{k}"] for k in (0, 1)]
        for figure, cell in zip(figures, re.findall(r"([\d.]+) %", shown), strict=True):
            assert float(cell) == pytest.approx(figure, abs=0.2)
        for runs in result["runs"].values():
            assert runs["faulty"]["steps"] == runs["clean"]["steps"] and runs["faulty"]["undecided"] == 0
            assert runs["faulty"]["hung"] > 0 and runs["faulty"]["failed"] > 0


def test_the_bound_without_sampling_ahead_is_that_of_the_file(root, page):
    result = json.loads((root / "scripts/benchmarks/judge_client.json").read_text())
    pattern = r"has ([\d.]+) such attempts.*?add\s([\d.]+) times.*?longer than (\d+) times"
    least, added, step = map(float, re.search(pattern, page, re.DOTALL).groups())
    # The mean of the greatest of 64 counts of attempts in vain, each of which is made with probability 0.07.
    assert least == pytest.approx(sum(1 - (1 - 0.07**k) ** 64 for k in range(1, 30)), abs=0.01)
    assert (least, added) == (pytest.approx(result["least"], abs=0.01), pytest.approx(result["added"], abs=0.01))
    assert step == round(added / 0.05) and added > least
