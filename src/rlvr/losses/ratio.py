"""The log of the probability ratio pi / pi_proximal, for each token or for its whole response."""

from __future__ import annotations

from typing import Literal

import torch

from rlvr.losses.tokens import TokenBatch

Ratio = Literal["token", "sequence", "geometric", "geometric_token"]


def log_ratio(tokens: TokenBatch, level: Ratio = "token", bound: float | None = None) -> torch.Tensor:
    """log pi - log pi_proximal [T], with gradient.

    token: of the token itself. sequence: summed over its response, the ratio of the whole response. geometric: the mean
    over its response (GSPO, Zheng et al. 2025, eq. 7). geometric_token: the value of geometric with each token's own
    gradient (GSPO-token), which advantages that differ within a response need.

    `bound` clamps each token's log-ratio to [-bound, bound] first; beyond it there is no gradient.
    """
    own = tokens.logprobs - tokens.proximal_logprobs
    if bound is not None:
        own = own.clamp(-bound, bound)
    if level == "token":
        return own
    if level == "sequence":
        return tokens.sum_by_sequence(own)[tokens.sequence]
    mean = tokens.mean_by_sequence(own)[tokens.sequence]
    if level == "geometric":
        return mean
    return mean.detach() + (own - own.detach())
