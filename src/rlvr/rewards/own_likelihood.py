"""The likelihood of a response under the policy that sampled it."""

from __future__ import annotations

import numpy as np

from rlvr.records import Batch
from rlvr.registry import register


@register("reward", "likelihood")
def sampled_likelihood(batch: Batch, *, mean: bool = True) -> np.ndarray:
    """The log-prob of the sampled tokens under the policy that sampled them, in nats: their mean, or with `mean: false`
    their sum.

    As `evaluation.scorer` it chooses the most likely of several responses. Undecided where a log-prob is unknown.
    """
    values = [r.behaviour_logprobs[r.sampled].astype(np.float64) for r in batch.rollouts]
    return np.asarray([np.nan if not len(v) else v.mean() if mean else v.sum() for v in values], dtype=np.float64)
