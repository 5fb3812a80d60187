"""Rewards of how sure the policy is, against values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reward_helpers import make_rollout
from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.records import Batch
from rlvr.rewards import SelfCertainty


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def with_statistics(**statistics):
    """One response of 3 tokens after a prompt of 2, with these token columns, and one without a token."""
    batch = Batch([make_rollout("g", 0, 3), make_rollout("g", 1, 0)])
    for name, values in statistics.items():
        batch.token_columns[f"{name}/current"] = [np.float32([np.nan, np.nan, *values]), np.float32([np.nan, np.nan])]
    return batch


def test_self_certainty_is_the_divergence_of_the_uniform_distribution(column, nan):
    """For logits (2, 0, 1): mean log-prob under the softmax, with the sign turned, is KL(U || p) + log 3."""
    logits = np.asarray([2.0, 0.0, 1.0])
    logp = logits - math.log(sum(math.exp(x) for x in logits))
    kl = sum(1 / 3 * (math.log(1 / 3) - p) for p in logp)
    total = math.log(sum(math.exp(x) for x in logits))
    batch = with_statistics(logsumexp=[total] * 3, mean_logit=[1.0] * 3)
    close(column(batch, "self_certainty"), [kl + math.log(3), nan])


def test_self_certainty_of_a_part_of_the_text():
    """The mean over the tokens of the first match, or of its first group; 0 without one."""
    batch = with_statistics(logsumexp=[1.0, 2.0, 4.0], mean_logit=[0.5, 0.5, 0.5])
    batch.rollouts[0].text = 'a "bc" d'
    batch.rollouts[0].char_ends = np.asarray([-1, -1, 2, 5, 8])
    batch.rollouts[1].char_ends = np.asarray([-1, -1])
    for within, want in (('"(.*)"', 1.5), ('".*"', 2.5), ("d", 3.5), ("(x)?a", 0.0), ("z", 0.0), (None, 11 / 6)):
        got = SelfCertainty(within=within)(batch)
        close(got[:1], [want])
    assert SelfCertainty(within="z").reads_characters and not SelfCertainty().reads_characters
    with pytest.raises(ConfigError, match="no regular expression"):
        registry.build("reward", {"name": "self_certainty", "within": "("})


def test_entropies(column, nan):
    batch = with_statistics(entropy=[0.2, 0.4, 0.9])
    close(column(batch, {"name": "entropy", "weight": -2}), [-1.0, nan])
