"""Flat tokens of ragged sequences for the tests of losses, and a loss's value with its gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from number_oracles import averaged, finite_differences
from rlvr.core.needs import CURRENT, REFERENCE
from rlvr.losses import Denominators, TokenBatch


class Case:
    """Random flat tokens of ragged sequences, whose ratios fall on both sides of the clips; some weigh nothing."""

    def __init__(self, seed, lengths=(3, 1, 5, 2, 4), spread=0.5):
        rng = np.random.default_rng(seed)
        self.sequence = np.repeat(np.arange(len(lengths)), lengths)
        rng.shuffle(self.sequence)  # tokens of a sequence need not be neighbours
        T = len(self.sequence)
        self.proximal = rng.normal(-2, 1, T)
        self.logprobs = self.proximal + rng.normal(0, spread, T)
        self.reference = self.logprobs + rng.normal(0, spread, T)
        self.advantage = rng.normal(0, 1, T)
        self.weight = rng.choice([0.0, 1.0, 1.0, 0.5], T)
        self.weight[self.sequence == 3] = 0.0  # a sequence that does not count
        self.weight[np.flatnonzero(self.sequence == 0)[0]] = 1.0
        self.entropy = rng.uniform(0, 3, T)
        self.S = len(lengths)

    def rows(self, values):
        return [[float(values[t]) for t in np.flatnonzero(self.sequence == s)] for s in range(self.S)]

    def over(self, constant=7.0):
        sums = [sum(row) for row in self.rows(self.weight)]
        return Denominators(sum(sums), sum(s > 0 for s in sums), constant)

    def batch(self, **replaced):
        tensors = {
            name: torch.tensor(replaced.get(name, getattr(self, name)), dtype=torch.float64)
            for name in ("logprobs", "reference", "entropy")
        }
        tensors = {name: t.requires_grad_(name != "reference") for name, t in tensors.items()}
        statistics = {
            ("logprobs", CURRENT): tensors["logprobs"],
            ("logprobs", REFERENCE): tensors["reference"],
            ("entropy", CURRENT): tensors["entropy"],
        }
        return TokenBatch(
            sequence=torch.tensor(self.sequence),
            sequences=self.S,
            weight=torch.tensor(self.weight),
            advantage=torch.tensor(self.advantage),
            proximal_logprobs=torch.tensor(self.proximal),
            behaviour_logprobs=torch.tensor(self.proximal),
            statistics=statistics,
        )

    def average(self, values, by):
        return averaged(self.rows(values), self.rows(self.weight), by, 7.0)


def value_and_gradient(loss, tokens, over, of=("logprobs", CURRENT)):
    value = loss(tokens, over).value
    (gradient,) = torch.autograd.grad(value, tokens.statistics[of])
    return float(value.detach()), gradient.numpy()


def same_sign(case):
    """One advantage per sequence, as the level of the response asks for."""
    case.advantage = np.asarray([(-1.0) ** s * (1 + 0.3 * s) for s in case.sequence])
    return case


def check(loss, case, wanted, smooth=slice(None), chosen=None, point=None, rtol=1e-6):
    """Value and gradient of `loss` are those of `wanted`, a function of the flat log-probs."""
    tokens = replace(case.batch(), chosen=chosen)
    value, gradient = value_and_gradient(loss, tokens, case.over())
    assert value == pytest.approx(wanted(case.logprobs), rel=1e-10, abs=1e-12)
    numeric = finite_differences(wanted if point is None else point, case.logprobs)
    np.testing.assert_allclose(gradient[smooth], numeric[smooth], rtol=rtol, atol=1e-8)
    assert np.abs(gradient).max() > 1e-4
