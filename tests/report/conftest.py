from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlvr.config.config_loading import load_config
from rlvr.monitor.metrics import record
from rlvr.monitor.rollout_log import RolloutLog
from rlvr.records import UPDATED, Batch, Rollout, StopReason, Task, Verdict, VerdictStatus

from .browser import Page, browser, find_browser

ALPHABET = [chr(c) for c in range(32, 127)] + ["\n", "é", "😀"]
STATUSES = (VerdictStatus.CORRECT, VerdictStatus.WRONG, VerdictStatus.UNPARSABLE)


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    """A page in a real browser."""
    if find_browser() is None:
        pytest.skip("no Chromium here: install the Debian package `chromium` to have the report tested in a browser")
    with browser() as opened:
        yield opened


def sampled(step: int, group: int, member: int, text: str, task: str, reason: str = "compared") -> Rollout:
    """A rollout whose tokens are the characters of `text`."""
    ids = [ALPHABET.index(c) for c in f"{task}?"] + [ALPHABET.index(c) for c in text]
    prompt, total = len(task) + 1, len(task) + 1 + len(text)
    status = STATUSES[(step + group + member) % 3]
    verdict = Verdict(status, 1.0 if status is VerdictStatus.CORRECT else 0.0, reason, answer=str(member))
    return Rollout(
        id=f"{step}-{group}-{member}",
        task=Task(task, f"{task}?", answer="42"),
        group=f"{step}-{group}",
        member=member,
        token_ids=np.asarray(ids),
        origin=np.asarray([0] * prompt + [1] * len(text), dtype=np.int8),
        behaviour_logprobs=np.asarray([np.nan] * prompt + [-0.5] * len(text), dtype=np.float32),
        policy_version=np.full(total, step, dtype=np.int32),
        stop=StopReason.END,
        text=text,
        verdicts={"math": verdict},
    )


def write_run(
    path: Path,
    steps: int = 6,
    groups: int = 2,
    size: int = 4,
    seed: int = 0,
    text: str = "so it is {}",
    every: int = 1,
    metrics: Callable[[int], dict[str, Any]] = lambda step: {},
    overrides: tuple[str, ...] = (),
) -> Path:
    """A run folder as the trainer writes it, with made-up numbers."""
    path.mkdir(parents=True)
    config = load_config(None, [f"run.seed={seed}", f"run.name={path.name}", *overrides])
    (path / "config.yaml").write_text(yaml.safe_dump(config.dump(), sort_keys=False))
    random, log = np.random.default_rng(seed), RolloutLog(path, every)
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = {
                "reward/mean": step / steps,
                "entropy": 1 / step,
                "grad_norm": random.random(),
                "run/stage": "grpo",
            }
            values |= {"verdict/correct": step / steps, "verdict/wrong": 1 - step / steps, "time/step": 2.0}
            values |= {"time/rollout": 1.5, "time/update": 0.5, "eval/greedy": 0.5 if step % 3 == 0 else None}
            file.write(json.dumps(record(values | metrics(step) | {"step": step})) + "\n")
            if not log.due(step):
                continue
            rollouts = [
                sampled(step, g, m, text.format(f"{g}{m}"), f"task-{step}-{g}")
                for g in range(groups)
                for m in range(size)
            ]
            batch = Batch(rollouts)
            batch.columns["reward"] = np.asarray([r.verdict.score for r in rollouts])  # type: ignore[union-attr]
            batch.columns["advantage"] = batch.columns["reward"] - batch.columns["reward"].mean()
            batch.token_columns[UPDATED] = [r.behaviour_logprobs + random.normal(0, 0.1, len(r)) for r in rollouts]
            log.write(step, batch)
    rows = [{"step": s, "stage": "grpo", "eval/greedy": s / 10, "eval/tasks": 8} for s in (0, 3, 6)]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(path / "checkpoints" / "step-1" / "model")
    return path


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A maker of run folders: `make_run(name, steps=6, ...)` (see `write_run`)."""
    return lambda name="run", **how: write_run(tmp_path / name, **how)
