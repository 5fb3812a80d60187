"""The gradients of a learner's optimizer steps on a recorded batch, for the tests of losses and recipes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from number_oracles import double, token_statistics
from rlvr.config import OptimConfig
from rlvr.learner import Learner
from rlvr.losses import ObjectiveTerm
from rlvr.policy import Snapshot

CUTS = [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_tokens": 30}]


def config(**options):
    return OptimConfig(**{"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 1e9, **options})


def moved(policy, size=0.03):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(size * torch.randn(p.shape, generator=generator))


class Steps:
    """A batch with recorded behaviour log-probs near the policy's own, and the gradients of its second optimizer
    step."""

    def __init__(self, make_policy, make_batch, recording):
        self.recording, self.policy = recording, make_policy()
        self.reference, self.reference_model = Snapshot(self.policy), double(self.policy)
        moved(self.policy)
        self.batch = make_batch(
            self.policy, rewards=((1.0, 0.0, 0.0, 0.5), (1.0, 1.0, 1.0), (0.25, np.nan, 1.0), (0.0, 1.0))
        )
        self.model = double(self.policy)
        rng = np.random.default_rng(1)
        self.batch.token_columns["factor/kl"] = [
            rng.choice([0.0, 1.0, 3.0], len(r)).astype(np.float32) for r in self.batch.rollouts
        ]
        for rollout in self.batch.rollouts:
            now = token_statistics(self.model, rollout)[0].detach().numpy()
            rollout.behaviour_logprobs[rollout.sampled] = now[rollout.sampled[1:]] + rng.normal(
                0, 0.3, int(rollout.sampled.sum())
            )

    def gradients(self, objective, **options):
        """Of every optimizer step; the policy does not move."""
        backend = self.recording(self.policy, moves=False)
        metrics = Learner(backend, self.reference).update(self.batch, objective, config(**options), 1.0)
        return backend.gradients, metrics


@pytest.fixture(scope="session")
def recorded_steps(make_policy, make_batch, recording):
    """The policy, the reference and the recorded batch that all tests of `steps` look at."""
    made = Steps(make_policy, make_batch, recording)
    models = made.policy.trainable(), made.reference.weights
    before = [{name: weight.detach().clone() for name, weight in weights.items()} for weights in models]
    yield made
    for weights, old in zip(models, before, strict=True):
        assert all(torch.equal(weight, old[name]) for name, weight in weights.items()), "a test moved what others share"


@pytest.fixture
def steps(recorded_steps):
    """`recorded_steps` with a batch of its own, to which an update writes columns. The policy does not move; a test
    that changes the reference makes its own `Steps`."""
    own = copy.copy(recorded_steps)
    own.batch = copy.deepcopy(recorded_steps.batch)
    return own


def component(loss, **more):
    return ObjectiveTerm(
        "policy", loss, "policy", zero_without_advantage=getattr(loss, "zero_without_advantage", False), **more
    )
