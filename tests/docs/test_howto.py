"""docs/howto: the files that a page shows are written into a folder, and the run that it shows is trained for two
steps."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlvr import GRPOTrainer, audit, merge, train
from rlvr.config.config_loading import load_config
from rlvr.core.tree import merge as laid_over

ROOT = Path(__file__).resolve().parents[2]
HOWTO = ROOT / "docs/howto"
PAGES = sorted(page.name for page in HOWTO.glob("*.md"))
BLOCK = re.compile(r"^```(?:python|yaml|json)\n# ([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TWO_PROCESSES = re.compile(r"^torchrun .* -m rlvr\.train (--config configs/(?:.*\\\n)*.*)$", re.MULTILINE)

TINY = {
    "run": {"name": "sample", "steps": 2},
    "model": {
        "scratch": {"hidden_size": 16, "layers": 1, "intermediate_size": 32, "context": 256},
        "path": None,
        "device": "cpu",
    },
    "rollout": {"engine": "hf", "prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6},
    "optim": {"micro_batch_tokens": None},
    "logging": {"console": "off"},
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A function that writes the named blocks of a page into the working directory and gives them by name."""

    def write(page: str) -> dict[str, str]:
        blocks = dict(BLOCK.findall((HOWTO / page).read_text(encoding="utf-8")))
        for name, text in blocks.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        return blocks

    return write


def trained(written: str, over=None, **parts):
    """The closed trainer of two steps of the run that the page writes, with a tiny policy."""
    tree = laid_over(laid_over(yaml.safe_load(written), TINY), over or {})
    with GRPOTrainer(config=load_config(tree), **parts) as trainer:
        assert [row["step"] for row in trainer.train()] == [1, 2]
    return trainer


@pytest.mark.gate
def test_own_verifier(files, capsys):
    blocks = files("own-verifier.md")
    trainer = trained(blocks["run.yaml"])
    for rollout in trainer.batch.rollouts:
        right = rollout.task.answer in rollout.text and len(rollout.text) <= 10
        assert rollout.verdict.score == float(right)
    assert audit.main(["--verifier", "check.py:contains_answer", "most=10", "--tricks"]) == 1
    assert "'42 or 43'" in (output := capsys.readouterr().out) and "'not 42'" in output


def test_own_data(files):
    blocks = files("own-data.md")
    trainer = trained(blocks["run.yaml"])
    assert {rollout.task.answer for rollout in trainer.batch.rollouts} <= {"36", "56"}
    assert [row["step"] for row in trainer.evaluations] == [0, 1, 2]
    assert all(row["eval/tasks"] == 1 for row in trainer.evaluations)

    trainer = trained(blocks["columns.yaml"], {"run": {"name": "columns"}, "rollout": {"prompts_per_step": 1}})
    task = trainer.batch.rollouts[0].task
    assert (task.prompt, task.answer, task.info) == ("What is 5 x 5?", "25", {"level": 1})


@pytest.mark.gate
def test_lora(files, tmp_path):
    blocks = files("lora.md")
    trainer = trained(
        blocks["run.yaml"], tasks=[{"prompt": d} for d in "0123"], verifier=lambda completion: len(set(completion)) / 6
    )
    trained_names = [name for name, p in trainer.policy.model.named_parameters() if p.requires_grad]
    assert trained_names and all("lora" in name for name in trained_names)
    saved = trainer.folder.path / "checkpoints/step-2/model"
    assert (saved / "adapter_config.json").is_file()
    assert merge.main([str(saved), str(tmp_path / "MERGED"), *base_of(saved)]) == 0
    assert (tmp_path / "MERGED" / "model.safetensors").is_file()


def base_of(saved: Path) -> list[str]:
    """The option that names the base of an adapter, where the adapter does not say it."""
    named = json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"]
    return [] if named and Path(named).is_dir() else ["--base", str(saved)]


def test_one_gpu_is_a_run_but_for_its_model_engine_and_size(files):
    blocks = files("one-gpu.md")
    config = load_config(yaml.safe_load(blocks["run.yaml"]))
    shipped = load_config(ROOT / "configs/gsm8k-qwen2.5-0.5b.yaml")
    assert config.model == shipped.model and config.data == shipped.data and config.evaluation == shipped.evaluation
    small = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    over = {"data": {"train": None, "eval": None}}
    trained(blocks["run.yaml"], over, tasks=small, eval_tasks=small[:1])


def test_several_gpus_is_a_configuration(files):
    blocks = files("several-gpus.md")
    config = load_config(laid_over(yaml.safe_load(blocks["run.yaml"]), {"run": {"steps": 1}}))
    assert config.distributed.backend.name == "deepspeed" and config.distributed.zero_stage == 2


def arguments(command: str) -> list[str]:
    """The words of a command that may go over several lines."""
    return shlex.split(command.replace("\\\n", " "))


def test_the_commands_of_the_pages_are_there(monkeypatch, capsys):
    text = "".join((HOWTO / page).read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"python -m rlvr\.(\w+)", text)) == {"train", "audit", "merge", "evaluate"}
    monkeypatch.chdir(ROOT)
    assert train.main([*arguments(TWO_PROCESSES.search(text)[1]), "--dry-run"]) == 0
    assert "runs/two" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_without_gpus(tmp_path):
    command = TWO_PROCESSES.search((HOWTO / "several-gpus.md").read_text(encoding="utf-8"))[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *arguments(command)[1:], f"run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "two/metrics.jsonl").read_text().splitlines()) == 5
