"""Whole runs of the trainer on models with random weights, and their results."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rlvr import GRPOTrainer
from stages.context import Context
from stages.models import model_section

KEPT = (
    "reward/mean",
    "grad_norm",
    "mismatch/mean",
    "mismatch/max",
    "policy/staleness_max",
    "tokens/sampled",
    "publish/bytes",
    "publish/seconds",
    "time/rollout",
    "time/update",
    "time/publish",
    "time/step",
    "time/tokens_per_second",
    "time/sampling_tokens_per_second",
    "time/update_tokens_per_second_per_device",
)
"""Metrics of a step that are kept."""
FAMILIES = ("memory/", "mfu/", "gpu/")
"""Metrics that begin so are kept too."""


def even_characters(completion: str) -> float:
    """A reward that varies: the share of characters with an even code."""
    return sum(ord(c) % 2 == 0 for c in completion) / max(1, len(completion))


@contextlib.contextmanager
def trainer_of(
    context: Context, model: str, rollout: dict[str, Any], steps: int, **sections: Any
) -> Iterator[GRPOTrainer]:
    """A trainer for `steps` steps on a model of a real shape; its run folder is removed at the end.

    `rollout` goes over small defaults; `adapter` among `sections` is the model's.
    """
    adapter = sections.pop("adapter", None)
    prompts = [f"{number} + {number + 1} =" for number in range(16)]
    size = {"prompts_per_step": 2, "group_size": 4} if context.toy else {"prompts_per_step": 8, "group_size": 8}
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "run": {"dir": folder, "name": "run", "steps": steps},
            "model": model_section(context, model, adapter=adapter, gradient_checkpointing=True),
            "data": {"max_prompt_tokens": 64},
            "rollout": {**size, **rollout},
            "optim": {"lr": 1e-5, "micro_batch_tokens": 16384},
            "logging": {"console": "off", "rollouts": 0},
            "verification": {"workers": 2},
            **sections,
        }
        with GRPOTrainer(None, prompts, even_characters, tree) as trainer:
            yield trainer


def run_and_summarize(
    context: Context, model: str, rollout: dict[str, Any], steps: int, **sections: Any
) -> dict[str, Any]:
    """Seconds to start, and what each step measured."""
    start = time.perf_counter()
    with trainer_of(context, model, rollout, steps, **sections) as trainer:
        started = round(time.perf_counter() - start, 2)
        return {"start_seconds": started, "steps": summary(trainer.train())}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of each step that are kept."""
    return [{key: row[key] for key in row if key in KEPT or key.startswith(FAMILIES)} for row in rows]
