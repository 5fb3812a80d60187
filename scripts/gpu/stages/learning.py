"""Stage 7: the quickstart in bfloat16, with vLLM on the trainer's GPU where it is installed: whether a run learns
arithmetic."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from typing import Any

import yaml

from rlvr import GRPOTrainer
from stages.context import ROOT, Context, SkipError
from stages.rollouts import EAGER
from stages.runs import summary

CHUNK = 10
"""Steps between two results that are kept, so that a run that is cut off says how far it came."""
SLOWER = 2.0
"""Times the last chunk that the next one may take: steps of reinforcement come after faster ones, and evaluations
between them."""
CLOSING_SECONDS = 20.0
"""That are kept for the end of engines and workers."""
CONSIDERED = 10
"""Steps at the beginning and at the end of reinforcement whose rewards are compared."""
GAIN = 0.05
"""Reward that reinforcement is to add: on a CPU in float32 the quickstart adds more."""


def run(context: Context) -> None:
    """Train, and compare the rewards."""
    with_vllm = not context.toy and importlib.util.find_spec("vllm") is not None
    found = context.measure("engine vllm" if with_vllm else "engine hf", learned, context, with_vllm)
    if found is not None and not context.toy:
        context.measure("gain", gain, found["rewards"], found["steps"] == found["of_steps"], expected=0.0)


def learned(context: Context, with_vllm: bool) -> dict[str, Any]:
    """Evaluations and the rewards of reinforcement, as far as the time allows."""
    with (
        tempfile.TemporaryDirectory() as folder,
        GRPOTrainer(config=configuration(context, folder, with_vllm)) as trainer,
    ):
        of_steps = sum(plan.allowed for plan in trainer.resolved.plans)
        rows = trained(context, trainer, of_steps)
        evaluations = trainer.evaluations
    rewards = [row["reward/mean"] for row in rows if row["run/stage"] == trainer.resolved.plans[-1].name]
    return {"steps": len(rows), "of_steps": of_steps, "evaluations": evaluations, "rewards": rewards}


def trained(context: Context, trainer: GRPOTrainer, of_steps: int) -> list[dict[str, Any]]:
    """The metrics of as many steps as the time allows, by what the last chunk of them took."""
    rows: list[dict[str, Any]] = []
    last = 0.0  # seconds
    while len(rows) < of_steps and context.seconds_left() > SLOWER * last + CLOSING_SECONDS:
        before = context.seconds_left()
        rows = trainer.train(CHUNK)
        last = before - context.seconds_left()
        context.record(f"after {len(rows)} steps", summary(rows[-1:]))
    return rows


def gain(rewards: list[float], complete: bool) -> dict[str, float]:
    """The rise of the reward over the steps of reinforcement. AssertionError where a complete run has none; SkipError
    where one that was cut off has too few steps, or has not risen yet."""
    if len(rewards) < 2 * CONSIDERED:
        raise SkipError(
            f"{len(rewards)} steps of reinforcement were taken in the time, and {2 * CONSIDERED} are compared"
        )
    first, last = (statistics.mean(part) for part in (rewards[:CONSIDERED], rewards[-CONSIDERED:]))
    if last < first + GAIN:
        text = f"the reward went from {first:.3f} to {last:.3f} in {len(rewards)} steps of reinforcement"
        raise AssertionError(text) if complete else SkipError(f"{text}, after which the time was over")
    return {"first": round(first, 4), "last": round(last, 4), "gain": round(last - first, 4)}


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
