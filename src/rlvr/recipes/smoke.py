"""A recipe at toy size: a few steps of the real trainer, and how far its gradient is from plain GRPO's (of a recipe
without reinforcement: from that of the plain likelihood).

Everything but sizes is the recipe's own: stages, verifier, rewards, selection, advantage, loss, template. The policy is
a tiny one from random weights, primed by imitation of the recipe's `shown` responses so that rewards differ.
"""

from __future__ import annotations

import copy
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvr.config import Config
from rlvr.config.config_loading import make_config
from rlvr.config.stage_plan import STAGE_SECTIONS
from rlvr.core.tree import merge
from rlvr.distributed import World
from rlvr.distributed.plain import PlainBackend
from rlvr.errors import TrainingError
from rlvr.learner import Learner
from rlvr.recipes.papers import Paper, Smoke
from rlvr.recipes.stand_ins import scripted_judge, with_stand_ins
from rlvr.rollout import StepRollouts
from rlvr.stages import Stage
from rlvr.trainer import GRPOTrainer

# Three groups of six: small for one core, with a chance of different rewards in each group.
SIZES = {"prompts_per_step": 3, "group_size": 6, "max_new_tokens": 16}
"""Largest sizes of a smoke run."""
# With a learning rate of 1e-2 enough that the tiny policy writes one of `shown`, right and wrong ones by turns. More
# would lower its entropy and make all members of a group alike.
PRIMING = 100
"""Steps of imitation."""
# Two, so that a component with a state (a controller, a history) is used after its first update.
STEPS = 2
"""Steps of each of the recipe's stages."""
# Arbitrary: far enough that ratios are clipped at 0.2, near enough that the gradient is finite.
MOVE = 0.3
"""Size of the move of the weights before the second gradient is taken, as a share of each tensor's size."""


def smoke_config(paper: Paper, folder: str, judge_url: str | None = None) -> Config:
    """The recipe at toy size, its run folder and its tiny frozen models under `folder`."""
    smoke = paper.recipe.smoke
    tree = copy.deepcopy(paper.tree)
    stages = tree.pop("stages", None) or [{"kind": "grpo"}]
    small = _small(tree, smoke)
    small |= {
        "run": {"name": paper.slug, "dir": folder, "seed": 0},
        "model": {"device": "cpu", "dtype": "float32", "scratch": _scratch(smoke)},
        "distributed": {"backend": "plain"},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {},
        "logging": {"console": "off", "rollouts": 0},
        "stages": [_priming(smoke), *(_small_stage(stage, smoke) for stage in stages)],
    }
    # Many workers are not for toy size.
    small.pop("verification", None)
    small = with_stand_ins(merge(small, smoke.set), Path(folder) / "models", judge_url)
    return make_config(small, where=f"{paper.slug} at toy size: ")


@contextmanager
def _toy_run(paper: Paper) -> Iterator[Config]:
    """The recipe at toy size in a folder of its own, with the judge that it asks."""
    with tempfile.TemporaryDirectory() as folder, scripted_judge(paper.recipe.smoke.judge) as url:
        yield smoke_config(paper, folder, url)


def _scratch(smoke: Smoke) -> dict[str, Any]:
    words = sorted({word for text in smoke.shown for word in text.split(" ") if len(word) > 1})
    # 1,536 tokens of context are for recipes with long templates; each word of the responses is one token, so that 16
    # new tokens hold an answer.
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64, "context": 1536}
    return {**sizes, "words": words}


def _small(tree: Mapping[str, Any], smoke: Smoke) -> dict[str, Any]:
    """The sections of a run or a stage with toy sizes."""
    result = dict(tree)
    rollout = dict(result.get("rollout", {}))
    optim = dict(result.get("optim", {}))
    for name, most in SIZES.items():
        rollout[name] = min(rollout.get(name, most), most)
    rollout.pop("engine", None)
    for name in ("micro_batch_tokens", "micro_batch_size", "warmup_steps"):
        optim.pop(name, None)
    # a batch is cut by whole groups, and more parts than groups are refused
    optim["updates_per_batch"] = min(optim.get("updates_per_batch", 1), rollout["prompts_per_step"])
    data = {k: v for k, v in result.get("data", {}).items() if k in ("template", "sampler")}
    result |= {"rollout": rollout, "optim": optim | {"lr": 2e-3}, "data": data | {"train": smoke.tasks}}
    return result


def _small_stage(stage: Mapping[str, Any], smoke: Smoke) -> dict[str, Any]:
    small = {key: value for key, value in stage.items() if key != "evaluation"}
    for section in ("rollout", "optim", "data"):
        if section in small:
            small[section] = _small({section: small[section]}, smoke)[section]
    if stage["kind"] == "sft":
        small["data"] = {**small.get("data", {}), "train": _demonstrations(smoke)}
    own: dict[str, Any] = merge({**small, "steps": STEPS}, smoke.stages.get(stage.get("name", stage["kind"]), {}))
    return own


def _priming(smoke: Smoke) -> dict[str, Any]:
    """Imitation of what is shown, before the recipe's own stages."""
    return {
        "kind": "sft",
        "name": "priming",
        "steps": PRIMING,
        "data": {"train": _demonstrations(smoke)},
        "rollout": {"prompts_per_step": 4},
        "optim": {"lr": 1e-2, "optimizer": "adamw", "schedule": "constant"},
        "algorithm": {"preset": "grpo"},
    }


def _demonstrations(smoke: Smoke) -> list[dict[str, Any]]:
    """Every task with every response."""
    return [
        {**task, "id": f"{number}-{of}", "demonstration": text}
        for of, task in enumerate(smoke.tasks)
        for number, text in enumerate(smoke.shown)
    ]


def smoke(paper: Paper) -> list[dict[str, Any]]:
    """Train the recipe at toy size; the metrics of its own stages' steps. TrainingError where a signal stopped it, and
    where no step of reinforcement (of a recipe without any, no step) had a gradient."""
    with _toy_run(paper) as config, GRPOTrainer(config=config) as trainer:
        everything = trainer.train()
        stopped = trainer.stop.signal
    # A trainer that gets a signal returns the steps before it, which may be the priming's alone.
    if stopped is not None:
        raise TrainingError(f"{paper.slug}: {signal.Signals(stopped).name} stopped it after {len(everything)} steps")
    rows = [row for row in everything if row["run/stage"] != "priming"]
    reinforced = [row for row in rows if row["reward/mean"] is not None]
    # Without a gradient nothing of the recipe was exercised, whatever else went well.
    if not any(row["grad_norm"] for row in reinforced or rows):
        rewards = [row["reward/mean"] for row in rows]
        skipped = [row["skipped/nonfinite"] for row in rows]
        raise TrainingError(
            f"{paper.slug}: no step had a gradient (mean rewards {rewards}, steps skipped as not finite {skipped})"
        )
    return rows


# against plain GRPO, or the plain likelihood


@dataclass(frozen=True)
class Difference:
    """The distance of two gradients of the same rollouts."""

    norm: float
    """The norm of the recipe's gradient."""
    plain_norm: float
    """The norm of plain GRPO's."""
    cosine: float
    """The cosine of the angle between them; NaN where one is 0."""
    relative: float
    """The norm of their difference over that of plain GRPO's; infinite where that is 0 and the difference is not."""


class _Recording(PlainBackend):
    """Keeps the gradient of every optimizer step, and takes none."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy, "sgd")
        self.gradients: list[np.ndarray] = []

    def step(self, lr: float, max_norm: float) -> float:
        self.gradients.append(
            np.concatenate(
                [p.grad.detach().double().flatten().numpy() for p in self.parameters.values() if p.grad is not None]
            )
        )
        return float(np.linalg.norm(self.gradients[-1]))


def against_grpo(paper: Paper) -> dict[str, Difference]:
    """The recipe's gradient against plain GRPO's with the verdict as reward, on the same rollouts, those of the second
    step of its first stage that samples: `on-policy`, and `moved`, after the weights were moved a little, where ratios
    are not 1 and clipping acts. Where no stage samples, its first stage's against that of an sft stage without
    options."""
    with _toy_run(paper) as config:
        tree = config.dump()
        plain = _plain_sections(tree) | {
            "run": {**tree["run"], "name": "grpo"},
            "rewards": ["verdict"],
            "algorithm": {"preset": "grpo"},
            "stages": [_plain_stage(stage) for stage in tree["stages"]],
        }
        with GRPOTrainer(config=config) as own, GRPOTrainer(config=make_config(plain)) as other:
            number = next((n for n, stage in enumerate(own.stages) if n > 0 and stage.samples), 1)
            # All stages before, and one step of this one: the second step is compared, after the components have a
            # state.
            own.train(sum(stage.steps for stage in own.stages[:number]) + 1)
            stage = own.stages[number]
            grpo = other.stages[number]
            collected = stage.collect(1)
            # Both gradients are of the same weights and the same rollouts.
            other.policy.model.load_state_dict(own.policy.model.state_dict())
            other.enter(number)
            both = [_gradients(stage, collected, own.policy), _gradients(grpo, collected, other.policy)]
            stage.roll_back()
    return {name: _difference(*(g[name] for g in both)) for name in ("on-policy", "moved")}


def _plain_stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage without what makes the recipe: the sections of rewards and algorithm, and the options of its kind."""
    sizes = (
        "kind",
        "name",
        "steps",
        *(section for section in STAGE_SECTIONS if section not in ("rewards", "algorithm")),
    )
    return _plain_sections({key: value for key, value in stage.items() if key in sizes})


def _plain_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with a section `rollout` that plain GRPO takes: it is given the recipe's rollouts and samples none, so
    truncation, which it refuses, and what replaces the groups of a selector that it does not have are left out."""
    result = dict(tree)
    if "rollout" in result:
        not_plain = ("top_p", "top_k", "min_p", "dynamic_sampling")
        result["rollout"] = {key: value for key, value in result["rollout"].items() if key not in not_plain}
    return result


def _gradients(stage: Stage, collected: StepRollouts, policy: Any) -> dict[str, np.ndarray]:
    batch, _ = stage.score(copy.deepcopy(collected))
    # One optimizer step an epoch, without clipping of the gradient. The first epoch has ratios of 1, the second those
    # of the moved weights.
    optim = stage.config.optim.model_copy(update={"updates_per_batch": 1, "epochs_per_batch": 2, "max_grad_norm": 1e9})
    objective = stage.objective().at(0, stage.steps)
    gradients = {}
    for name, of, move in (("on-policy", 0, 0.0), ("moved", 1, MOVE)):
        # The same noise for both policies.
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in policy.model.parameters():
                # Noise in proportion to each tensor's own spread, since norms and matrices differ by orders of
                # magnitude.
                p += move * p.std(unbiased=False) * torch.randn(p.shape, generator=noise)
        backend = _Recording(policy)
        Learner(backend, stage.reference, World()).update(batch, objective, optim, 1.0)
        if len(backend.gradients) > of:
            gradients[name] = backend.gradients[of]
        else:
            # No step was taken: the batch gave no gradient.
            gradients[name] = np.zeros(1)
    return gradients


def _difference(own: np.ndarray, plain: np.ndarray) -> Difference:
    size = float(np.linalg.norm(own))
    other = float(np.linalg.norm(plain))
    apart = float(np.linalg.norm(own - plain))
    if size and other:
        cosine = float(own @ plain / (size * other))
    else:
        cosine = float("nan")
    return Difference(size, other, cosine, apart / other if other else (float("inf") if apart else 0.0))
