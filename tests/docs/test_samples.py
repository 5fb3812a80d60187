"""The samples of docs/architecture.md, cut out of the page and trained with: two steps of the real trainer each."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlvr import Batch, GRPOTrainer
from rlvr.config.config_loading import load_config
from rlvr.core.tree import merge
from rlvr.monitor.recording import read_rollouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
BLOCK = re.compile(r"^```(python|yaml)\n# ([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

BLOCKS = {(kind, name): text for kind, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8"))}
SAMPLES = [name for kind, name in BLOCKS if kind == "python"]

TINY = {
    "run": {"name": "sample", "steps": 2},
    "model": {
        "scratch": {"alphabet": "0123456789", "hidden_size": 16, "layers": 1, "intermediate_size": 32, "context": 24},
        "device": "cpu",
    },
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6},
    "optim": {"lr": 1.0e-3},
    "logging": {"console": "off"},
}


def even(completion: str) -> bool:
    """What judges where the sample is no verifier."""
    return completion[-1:] in tuple("02468")


def even_after_even(prompt: str, completion: str) -> bool:
    """The same, but an odd prompt has no right answer, so that some groups are all wrong."""
    return prompt in "02468" and even(completion)


def test_the_page_has_the_samples_that_it_promises():
    headings = re.findall(
        r"^### (.*)", PAGE.read_text(encoding="utf-8").split("## How to add a component")[1], re.MULTILINE
    )
    assert len(headings) == len(SAMPLES) == 7
    assert set(BLOCKS) == {(kind, name) for kind in ("python", "yaml") for name in SAMPLES}
    assert set(SAMPLES) == set(CHECKS)


@pytest.mark.gate
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_short_and_trains(name, tmp_path, monkeypatch):
    code = BLOCKS["python", name]
    assert sum(bool(line.strip()) for line in code.splitlines()) < 30
    (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = load_config(merge(TINY, yaml.safe_load(BLOCKS["yaml", name])))
    judge = even_after_even if name == "second_chance.py" else even
    verifier = judge if config.verifier is None else None

    with GRPOTrainer(tasks=[{"prompt": digit} for digit in "0123456789"], verifier=verifier, config=config) as trainer:
        metrics = trainer.train()

    assert [row["step"] for row in metrics] == [1, 2]
    assert all(math.isfinite(row[key]) for row in metrics for key in ("reward/mean", "loss/policy", "grad_norm"))
    assert all(row["skipped/nonfinite"] == 0 for row in metrics)
    assert max(row["grad_norm"] for row in metrics) > 0
    CHECKS[name](trainer, trainer.batch)


def digit_sum(trainer, batch):
    for rollout in batch.rollouts:
        verdict = rollout.verdicts["DigitSum"]
        digits = [int(character) for character in rollout.text]
        assert verdict.score == (bool(digits) and sum(digits) % 2 == 0)
        assert verdict.status != "error"


def batch_mean(trainer, batch):
    reward = batch.column("reward")
    assert np.allclose(batch.column("advantage"), reward - reward.mean())


def cispo(trainer, batch):
    first, second = trainer.metrics
    assert first["ratio/max"] > 1  # the second of two optimizer steps is off the sampled policy
    assert second["ratio/clipped_high"] is not None
    assert first["ratio/clipped_low"] is None  # the clip loss did not run


def brevity(trainer, batch):
    lengths = np.asarray([rollout.completion_length for rollout in batch.rollouts])
    assert np.allclose(batch.column("reward/brevity"), np.minimum(1, 3 / lengths))
    assert np.allclose(batch.column("reward"), batch.column("reward/verdict") + 0.2 * batch.column("reward/brevity"))


def at_most(trainer, batch):
    assert [len(group.index) for group in batch.groups()] == [2, 2]
    assert trainer.metrics[-1]["group/count"] == 2
    for group in batch.groups():
        low, high = batch.column("reward")[group.index]
        assert {low, high} == {0.0, 1.0} or low == high


def second_chance(trainer, batch):
    sizes = set()
    for path in (trainer.folder.path / "rollouts").iterdir():
        for group in Batch(read_rollouts(path)[0]).groups():
            solved = any(rollout.verdict.score == 1 for rollout in group.rollouts[:4])
            assert len(group.rollouts) == (4 if solved else 6)
            sizes.add(len(group.rollouts))
    assert 6 in sizes


def higher_lower(trainer, batch):
    told = 0
    for rollout in batch.rollouts:
        turns = [rollout.token_ids[s.start : s.end] for s in rollout.segments if s.kind == "turn"]
        replies = [rollout.token_ids[s.start : s.end] for s in rollout.segments if s.kind == "tool"]
        decode = trainer.policy.tokenizer.decode
        for turn, reply in zip(turns, replies, strict=False):
            guess = decode(turn, skip_special_tokens=True)
            assert decode(reply) == str(int((int(guess) if guess else -1) < int(rollout.task.prompt)))
        assert len(replies) in (len(turns) - 1, len(turns)) and len(turns) <= 2
        told += len(replies)
    assert told


CHECKS = {
    "digit_sum.py": digit_sum,
    "batch_mean.py": batch_mean,
    "cispo.py": cispo,
    "brevity.py": brevity,
    "at_most.py": at_most,
    "second_chance.py": second_chance,
    "higher_lower.py": higher_lower,
}
