"""Stage 7: the quickstart in bfloat16, with vLLM on the trainer's GPU where it is installed: does a run learn arithmetic?"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from typing import Any

import yaml

from rlvr import GRPOTrainer
from stages.context import ROOT, Context
from stages.rollouts import EAGER
from stages.runs import summary

CHUNK = 30
"""Steps between two results that are kept, so that a run that is cut off says how far it came."""
CONSIDERED = 10
"""Steps at the beginning and at the end of reinforcement whose rewards are compared."""
GAIN = 0.05
"""Reward that reinforcement is to add: on a CPU in float32 the quickstart adds more."""


def run(context: Context) -> None:
    """Train, and compare the rewards."""
    with_vllm = not context.toy and importlib.util.find_spec("vllm") is not None
    context.measure("engine vllm" if with_vllm else "engine hf", learned, context, with_vllm)


def learned(context: Context, with_vllm: bool) -> dict[str, Any]:
    """Evaluations and the rewards of reinforcement. AssertionError where they did not rise; not asked of a toy."""
    with (
        tempfile.TemporaryDirectory() as folder,
        GRPOTrainer(config=configuration(context, folder, with_vllm)) as trainer,
    ):
        rows: list[dict[str, Any]] = []
        while context.seconds_left() > 20:
            rows = trainer.train(CHUNK)
            context.record(f"after {len(rows)} steps", summary(rows[-1:]))
            if len(rows) >= sum(plan.allowed for plan in trainer.plans):
                break
        evaluations = trainer.evaluations
    rewards = [row["reward/mean"] for row in rows if row["run/stage"] == trainer.plans[-1].name]
    found: dict[str, Any] = {"steps": len(rows), "evaluations": evaluations, "rewards": rewards}
    if not context.toy:
        first, last = (statistics.mean(part) for part in (rewards[:CONSIDERED], rewards[-CONSIDERED:]))
        if last < first + GAIN:
            raise AssertionError(f"the reward went from {first:.3f} to {last:.3f} in {len(rewards)} steps: {found}")
        found["gain"] = round(last - first, 4)
    return found


def configuration(context: Context, folder: str, with_vllm: bool) -> dict[str, Any]:
    """The quickstart in bfloat16; of a toy a few small steps."""
    tree = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8"))
    tree["run"] |= {"dir": folder}
    tree["model"] |= {"device": context.device, "dtype": "bfloat16"}
    tree["logging"] = {"console": "off", "rollouts": 0}
    if with_vllm:
        tree["rollout"] |= {"engine": EAGER}
    if context.toy:
        tree["data"]["train"] |= {"count": 100}
        tree["data"]["eval"] |= {"count": 4}
        tree["evaluation"] |= {"samples": 1, "k": [1]}
        tree["verification"] = {"workers": 1}
        sft, grpo = tree["stages"]
        sft |= {"steps": 3}
        sft["rollout"] |= {"prompts_per_step": 4}
        grpo |= {"steps": 2}
        grpo["rollout"] |= {"prompts_per_step": 2, "group_size": 4}
    return tree
