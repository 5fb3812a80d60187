"""CoPG: contrastive policy gradient without a pull to the reference."""

from __future__ import annotations

import numpy as np
import torch

from rlvr.recipes.copg.copg import ContrastiveLoss
from sequence_cases import as_batch, responses


def test_at_beta_0_copg_is_twice_rloo():
    s = responses(1, [1.0, 0.0, 0.3, 0.9], [0, 0, 0, 0])
    batch = as_batch(s)
    (gradient,) = torch.autograd.grad(ContrastiveLoss(0.0).sequence_losses(batch).sum(), batch.logprobs)
    reward = np.asarray(s.reward)
    leave_one_out = reward - (reward.sum() - reward) / 3
    np.testing.assert_allclose(gradient.numpy(), -2 * leave_one_out / 4, rtol=1e-9)
