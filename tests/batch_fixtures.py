"""Small recorded batches, and a backend that keeps the gradients that it was asked to step with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from number_oracles import group_advantages
from rlvr.distributed.plain import PlainBackend
from rlvr.records import Batch, Origin, Rollout, StopReason, Task


class RecordingBackend(PlainBackend):
    """A plain backend that keeps a copy of the gradients of every optimizer step, before clipping."""

    def __init__(self, policy, optimizer=None, moves=True):
        super().__init__(policy, optimizer or "sgd")
        self.gradients: list[torch.Tensor] = []
        self.passes = 0
        self.moves = moves

    def backward(self, loss):
        self.passes += 1
        super().backward(loss)

    def step(self, lr, max_norm):
        self.gradients.append(torch.cat([p.grad.detach().double().flatten() for p in self.parameters.values()]))
        return super().step(lr, max_norm) if self.moves else float(self.gradients[-1].norm())


@pytest.fixture(scope="session")
def recording():
    return RecordingBackend


@pytest.fixture(scope="session")
def make_rollout():
    """`make(ids, prompt=3, group="g", member=0)`: a rollout whose tokens from position `prompt` on were sampled."""

    def make(ids, prompt=3, group="g", member=0, behaviour=None, temperature=1.0, text="", **more):
        ids = np.asarray(ids, dtype=np.int64)
        origin = np.full(len(ids), Origin.POLICY, dtype=np.int8)
        origin[:prompt] = Origin.PROMPT
        logprobs = np.full(len(ids), np.nan, dtype=np.float32)
        if behaviour is not None:
            logprobs[prompt:] = behaviour
        return Rollout(
            id=f"{group}/{member}",
            task=more.pop("task", None) or Task(id=f"task-{group}", prompt="?", answer="4"),
            group=group,
            member=member,
            token_ids=ids,
            origin=origin,
            behaviour_logprobs=logprobs,
            policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
            stop=StopReason.END,
            text=text,
            temperature=temperature,
            **more,
        )

    return make


REWARDS = ((1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 1.0), (0.25, np.nan, 1.0), (np.nan, np.nan), (0.0, 1.0))
"""By group: mixed, zero variance, with an undecided member, all undecided, mixed."""


@pytest.fixture(scope="session")
def make_batch(make_rollout):
    """`make(policy, seed=0, rewards=REWARDS)`: ragged random rollouts with rewards, advantages and weights, as a stage
    makes them; behaviour log-probs are noise round -2 where they are known."""

    def make(policy, seed=0, rewards=REWARDS, known=True, temperatures=(1.0, 0.7, 1.3), scale="std"):
        rng = np.random.default_rng(seed)
        rollouts = []
        for g, members in enumerate(rewards):
            prompt = int(rng.integers(1, 7))
            head = rng.integers(3, len(policy.tokenizer), prompt)
            for m in range(len(members)):
                tail = rng.integers(3, len(policy.tokenizer), int(rng.integers(1, 14)))
                noise = rng.normal(-4.0, 0.5, len(tail))
                ids = np.concatenate([head, tail])
                temperature = temperatures[g % len(temperatures)]
                rollouts.append(
                    make_rollout(ids, prompt, f"g{g}", m, noise if known else None, temperature=temperature)
                )
        flat = [r for members in rewards for r in members]
        advantages = group_advantages(flat, [r.group for r in rollouts], "mean", scale, 1e-4)
        on = np.isfinite(flat)
        batch = Batch(rollouts, {"reward": np.asarray(flat), "advantage": np.asarray(advantages)})
        batch.token_columns["weight/policy"] = [
            ((r.origin == Origin.POLICY) & keep).astype(np.float32) for r, keep in zip(rollouts, on, strict=True)
        ]
        return batch

    return make
