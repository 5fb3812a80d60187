"""verl's own reward functions, `compute_score(data_source, solution_str, ground_truth, extra_info)`, as verifiers."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import yaml

from rlvr import FunctionVerifier, Task, registry
from rlvr.errors import ConfigError
from rlvr.records import VerdictStatus
from rlvr.replay.__main__ import main as replay
from rlvr.train import main as train
from rlvr.verifiers.base import as_verdict, judged
from small_run import TREE, lines, overlaid

VERL = '''
"""As in verl/utils/reward_score: one function for several data sets."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = ground_truth in solution_str
    if data_source == "plain":
        return right
    return {"score": float(right) - 0.5, "acc": right, "length": len(solution_str), "pred": solution_str[:1],
            "split": extra_info["split"], "bad": float("nan")}
'''
TASK = Task("t", "1+1=", "2", info={"split": "test", "index": 3}, source="gsm8k")


def verdict(function, task, completion):
    return asyncio.run(judged(FunctionVerifier(function), task, completion))


def test_a_function_in_verls_form_gets_verls_arguments():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return 0.25

    assert verdict(compute_score, TASK, "12").score == 0.25
    assert seen == [("gsm8k", "12", "2", {"split": "test", "index": 3})]
    assert FunctionVerifier(compute_score).check_task(TASK) is None

    def with_more(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        return {"score": solution_str == ground_truth}

    assert verdict(with_more, TASK, "2").status is VerdictStatus.CORRECT


def test_the_values_of_a_mapping_are_named_scores_and_pred_is_the_answer():
    made = as_verdict({"score": 0.5, "acc": True, "format": 1, "pred": "7", "note": "text", "bad": math.inf}, "f")
    assert (made.score, made.scores, made.answer) == (0.5, {"acc": 1.0, "format": 1.0}, "7")
    assert as_verdict({"score": None, "acc": 1}, "f").status is VerdictStatus.ERROR
    # Without a score it is no result of verl's.
    assert "not a number" in as_verdict({"acc": 1}, "f").reason


@pytest.mark.gate
def test_a_run_of_a_yaml_file_pays_a_named_value_and_is_replayed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl_score.py").write_text(VERL)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n}=?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(4)
    ]
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {
        "run": {"dir": "runs", "steps": 2},
        "data": {"train": "verl.jsonl", "template": {"text": True}},
        "verifier": "verl_score.py:compute_score",
        "rewards": ["verdict", {"name": "verdict", "part": "length", "as": "length", "weight": 0.1}],
    }
    del over["data"]["template"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(overlaid(TREE, over)))
    assert train(["--config", "run.yaml"]) == 0
    (first, _) = lines("runs/run/metrics.jsonl")
    assert first["reward/length"] > 1
    recorded = lines(next((tmp_path / "runs/run/rollouts").glob("step-*1.jsonl")))
    assert {json.dumps(sorted(row["verdicts"]["compute_score"]["scores"])) for row in recorded} == {'["acc", "length"]'}
    capsys.readouterr()
    assert replay(["runs/run", "--output", "again.jsonl"]) == 0
    assert all(row["before"]["columns"] == row["after"]["columns"] for row in lines("again.jsonl"))


def test_a_parameter_that_verl_has_not_is_named():
    def compute_score(solution_str, ground_truth, tokenizer):
        return 0.0

    assert "asks for 'tokenizer'" in FunctionVerifier(compute_score).check_task(TASK)
    with pytest.raises(ConfigError, match="no class or function 'compute_scores'; did you mean"):
        registry.find("verifier", f"{__file__}:compute_scores")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """What the last test nearly names."""
    return 0.0
