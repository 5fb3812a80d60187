"""One short run of a workload by TRL's GRPOTrainer, in TRL's environment; speed.py starts it.

    python trl_side.py WORKLOAD_AS_JSON MODEL_FOLDER RESULT.json

bf16 and gradient checkpointing, which GRPOConfig turns on, are off, as on our side: on a CPU both only cost time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from speed_workloads import Stopwatch, Workload, prompts, score
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PHASES = {"_generate": "rollout", "_calculate_rewards": "verify", "training_step": "training_step"}
"""TRL's methods and the phases they are; training_step contains the others, and is taken apart below."""


class Ends(TrainerCallback):
    """Hands each step's end to the stopwatch."""

    def __init__(self, stopwatch: Stopwatch, spent: dict[str, float]) -> None:
        self.stopwatch, self.spent = stopwatch, spent

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.stopwatch.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stopwatch.ends.append(time.perf_counter())
        rollout, verify, whole = (self.spent.get(name, 0.0) for name in ("rollout", "verify", "training_step"))
        self.stopwatch.phases.append({"rollout": rollout, "verify": verify, "update": whole - rollout - verify})
        self.spent.clear()


def timed(trainer: GRPOTrainer, name: str, phase: str, spent: dict[str, float]) -> None:
    """Count the seconds in a method of the trainer."""
    inner: Callable[..., Any] = getattr(trainer, name)

    def outer(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            spent[phase] += time.perf_counter() - start

    setattr(trainer, name, outer)


def main(settings: str, model: str, result: str) -> None:
    torch.set_num_threads(1)
    workload = Workload(**json.loads(settings))
    rows = workload.prompts * workload.group
    micro = workload.micro_batch or rows
    stopwatch, spent = Stopwatch(), defaultdict(float)

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = [score(workload, *one) for one in zip(prompts, completions, completion_ids, strict=True)]
        stopwatch.tokens.append(sum(map(len, completion_ids)))
        stopwatch.rewards.append(sum(found) / len(found))
        return found

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=workload.steps,
            beta=0.0,
            loss_type="dapo",
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=workload.group,
            max_completion_length=workload.new_tokens,
            learning_rate=workload.learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            callbacks=[Ends(stopwatch, spent)],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(workload)]),
        )
        for method, phase in PHASES.items():
            timed(trainer, method, phase, spent)
        trainer.train()
    versions = {package: version(package) for package in ("trl", "torch", "transformers")}
    Path(result).write_text(json.dumps({**stopwatch.summary(workload), "versions": versions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
