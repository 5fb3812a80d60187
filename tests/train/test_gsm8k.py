"""The shipped GSM8K smoke config on the real files, through the command."""

import json

import pytest

from rlvr.train import main

CONFIG = "configs/gsm8k-smoke.yaml"


@pytest.mark.gate
def test_the_smoke_config_runs_on_the_real_rows(gsm8k, tmp_path, monkeypatch, request, capsys):
    monkeypatch.chdir(request.config.rootpath)
    data = [f"data.train={gsm8k / 'train.jsonl'}", f"data.eval={gsm8k / 'test.jsonl'}"]
    assert main(["--config", CONFIG, *data, f"run.dir={tmp_path}"]) == 0
    assert "tasks are left out, they are too long" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "gsm8k-smoke" / "metrics.jsonl").read_text().splitlines()]
    assert [row["run/stage"] for row in rows] == ["sft"] * 4 + ["grpo"] * 3
    assert rows[3]["loss/likelihood"] < rows[0]["loss/likelihood"]
    assert all(row["verdict/error"] == 0 for row in rows[4:])
    assert (tmp_path / "gsm8k-smoke" / "checkpoints" / "step-7" / "model" / "model.safetensors").is_file()


def test_every_gold_of_the_real_files_can_be_verified(gsm8k):
    from rlvr.data import load_tasks
    from rlvr.verifiers import MathVerifier

    verifier = MathVerifier()
    tasks = [*load_tasks(str(gsm8k / "train.jsonl")), *load_tasks(str(gsm8k / "test.jsonl"))]
    assert len(tasks) == 7473 + 1319
    assert [task.id for task in tasks if verifier.check_task(task) is not None] == []
