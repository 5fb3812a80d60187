"""Sums of log-probs of responses in groups, as a loss of responses gets them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from rlvr.losses import SequenceBatch

GROUPS = [0, 0, 0, 0, 1, 1, 2, 2, 2, 3]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.25, 1.0]


def responses(seed=0, rewards=REWARDS, groups=GROUPS):
    """Sums of log-probs of ten responses in four groups: mixed, equal, with a part score, alone."""
    rng = np.random.default_rng(seed)
    n = len(groups)
    logprobs = rng.normal(-9, 2, n)
    return SimpleNamespace(
        logprobs=logprobs,
        proximal=logprobs + rng.normal(0, 0.5, n),
        reference=logprobs + rng.normal(0, 0.8, n),
        group=list(groups),
        reward=list(rewards),
    )


def as_batch(s):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    one = torch.ones(len(s.group), dtype=torch.float64)
    return SequenceBatch(
        tensor(s.logprobs).requires_grad_(),
        tensor(s.proximal),
        tensor(s.reference),
        one,
        torch.tensor(s.group, dtype=torch.int64),
        tensor(s.reward),
        0 * one,
    )
