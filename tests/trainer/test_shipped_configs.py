"""The shipped configs that no other test runs, at toy size on a CPU: everything but the size of the model and the hub is theirs."""

import json
from pathlib import Path

import yaml

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy import load_policy
from rlvr.train import main


def test_the_gsm8k_config_runs_with_a_local_qwen2_folder(tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    scratch = ScratchConfig(architecture="qwen2", hidden_size=32, layers=2, intermediate_size=64, context=700)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu"))
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"Twice {n} is {2 * n}.\n#### {2 * n}"} for n in range(40)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"model.path={tmp_path / 'model'}",
        "model.device=cpu",
        "model.dtype=bfloat16",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'test.jsonl'}",
        f"run.dir={tmp_path / 'runs'}",
        "run.steps=2",
        "rollout.max_new_tokens=16",
        "evaluation.limit=4",
    ]
    assert main(["--config", "configs/gsm8k-qwen2.5-0.5b.yaml", *overrides]) == 0
    metrics = tmp_path / "runs" / "gsm8k-qwen2.5-0.5b" / "metrics.jsonl"
    first, second = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert first["tokens/sampled"] > 0
    assert first["mismatch/mean"] is None or first["mismatch/mean"] < 0.1
    assert second["policy/version"] == 2


def test_the_mbpp_config_runs_with_a_local_qwen2_folder(tmp_path, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    scratch = ScratchConfig(architecture="qwen2", hidden_size=32, layers=2, intermediate_size=64, context=900)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu"))
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
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
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"model.path={tmp_path / 'model'}",
        "model.device=cpu",
        "model.dtype=bfloat16",
        f"data.train={tmp_path / 'train.jsonl'}",
        f"data.eval={tmp_path / 'test.jsonl'}",
        f"run.dir={tmp_path / 'runs'}",
        "run.steps=1",
        "rollout.prompts_per_step=4",
        "rollout.max_new_tokens=16",
        "evaluation.limit=4",
        "verifier.validate=true",
    ]
    assert main(["--config", "configs/mbpp-qwen2.5-coder-1.5b.yaml", *overrides]) == 0
    (step,) = metrics(tmp_path / "runs" / "mbpp-qwen2.5-coder-1.5b")
    assert step["verdict/unparsable"] + step["verdict/wrong"] == 1


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
