"""The configurations of canonical methods: they name their sources, load as they are, and train at toy size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rlvr import load_config
from small_run import changed, overlaid, weights

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs/methods").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_method_names_its_command_and_the_sources_of_its_numbers(file):
    text = file.read_text(encoding="utf-8")
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert f"python -m rlvr.train --config configs/methods/{file.name}\n" in head
    assert re.search(r"arXiv \d{4}\.\d{5}", head)
    assert re.search(r"commit [0-9a-f]{7}|section \d", head)
    assert load_config(file).run.name == file.stem


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_method_trains_at_toy_size(make_trainer, file):
    """Its rewards and algorithm are the file's; a right answer is an even digit, so that groups differ."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    dynamic = tree["rollout"].get("dynamic_sampling")
    rewards = tree.get("rewards", ["verdict"])
    for term in rewards:
        if term != "verdict":
            term["cache"] = 2  # of the 6 tokens of a small run
    over = {
        "algorithm": tree["algorithm"],
        "rewards": rewards,
        "rollout": {"prompts_per_step": 4, **({"dynamic_sampling": {"attempts": 3}} if dynamic else {})},
        "optim": {"updates_per_batch": min(4, tree["optim"].get("updates_per_batch", 1)), "lr": 1e-2},
    }
    trainer = make_trainer(overlaid({"model": {"scratch": {"context": 64}}}, over))
    before = weights(trainer)
    trainer.train(2)
    assert changed(before, weights(trainer))
    assert all(row["grad_norm"] > 0 and row["skipped/nonfinite"] in (0.0, None) for row in trainer.metrics)
