"""The shipped configs that no other test runs, at toy size on a CPU: everything but the size of the model and the hub
is theirs."""

import json
from pathlib import Path

import pytest
import yaml

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy import load_policy
from rlvr.train import main


def trained(name, context, rows, folder, *more):
    """The metrics of the config `name` with a toy model in a local folder, and these rows to train and evaluate on."""
    scratch = ScratchConfig(architecture="qwen2", hidden_size=32, layers=2, intermediate_size=64, context=context)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu"))
    policy.model.save_pretrained(folder / "model")
    policy.tokenizer.save_pretrained(folder / "model")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"model.path={folder / 'model'}",
        "model.device=cpu",
        "model.dtype=bfloat16",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'test.jsonl'}",
        f"run.dir={folder / 'runs'}",
        "rollout.max_new_tokens=16",
        "evaluation.limit=4",
        *more,
    ]
    assert main(["--config", f"configs/{name}.yaml", *overrides]) == 0
    return metrics(folder / "runs" / name)


@pytest.mark.gate
def test_the_gsm8k_config_runs_with_a_local_qwen2_folder(tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"Twice {n} is {2 * n}.\n#### {2 * n}"} for n in range(40)]
    first, second = trained("gsm8k-qwen2.5-0.5b", 700, rows, tmp_path, "run.steps=2")
    assert first["tokens/sampled"] > 0
    assert first["mismatch/mean"] is None or first["mismatch/mean"] < 0.1
    assert second["policy/version"] == 2


@pytest.mark.gate
def test_the_mbpp_config_runs_with_a_local_qwen2_folder(tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    rows = [
        {
            "task_id": n,
            "text": f"Write a function to add {n}.",
            "code": f"def add(x):\n    return x + {n}",
            "test_list": [f"assert add(1) == {n + 1}", f"assert add(2) == {n + 2}"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for n in range(40)
    ]
    small = ("run.steps=1", "rollout.prompts_per_step=4", "verifier.validate=true", "verifier.case_time=60")
    (step,) = trained("mbpp-qwen2.5-coder-1.5b", 900, rows, tmp_path, *small)
    assert step["verdict/unparsable"] + step["verdict/wrong"] == 1


@pytest.mark.gate
def test_the_code_smoke_config_runs_both_stages(tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    tree = yaml.safe_load(Path("configs/code-smoke.yaml").read_text())
    imitate, reinforce = tree["stages"]
    imitate["steps"], reinforce["steps"] = 3, 1
    reinforce["rollout"]["prompts_per_step"] = 2
    tree["data"]["eval"]["count"], tree["run"]["dir"] = 4, str(tmp_path)
    (tmp_path / "smoke.yaml").write_text(yaml.safe_dump(tree))
    assert main(["--config", str(tmp_path / "smoke.yaml")]) == 0
    *_, last = metrics(tmp_path / "code-smoke")
    assert last["step"] == 4
    assert last["verdict/error"] == 0


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
