"""Causal attention of rows of one length without gradients, as an engine reads prompts.

By the kernels of packed rows, none of which makes a tensor with the queries along one dimension and the keys along
another.
"""

from __future__ import annotations

import numpy as np
import torch

from rlvr.policy.attention.calls import ScoreRule
from rlvr.policy.attention.kernels import kernel_for
from rlvr.policy.attention.packed_rows import Spans
from rlvr.policy.attention.padded import Padded


class CausalRows:
    """`rows` rows of `length` tokens each."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.rows = rows
        self.length = length
        # Each row is a run that continues no other.
        self._spans = Spans(np.full(rows, length), np.full(rows, -1), device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: ScoreRule,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[R, L, H, D], [R, L, G, D], [R, L, G, E] -> [R, L, H, E]; H is a multiple of G.

        A token sees the tokens up to itself, `window` of them at most (None: all). `sinks`: a score for each head, [H],
        that has no value.
        """
        (segments,) = self._spans.segments(window)
        kernel = kernel_for(query, value, segments, scoring)
        if isinstance(kernel, Padded):
            # Rows of one length are side by side already.
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            output, lse = kernel.dense.forward(query, key, value, segments, scoring)
            if sinks is not None:
                output = output * _share(lse, sinks[:, None])[..., None].to(output.dtype)
            return output.transpose(1, 2)
        # [R, L, heads, D] -> [R x L, heads, D]: stretch after stretch.
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        output, lse = kernel.forward(query, key, value, segments, scoring)
        if sinks is not None:
            output = output * _share(lse, sinks[:, None]).t()[..., None].to(output.dtype)
        return output.unflatten(0, (self.rows, self.length))


def _share(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The probability of all keys together, exp(lse) / (exp(lse) + exp(sink)), of queries [..., H, N]."""
    return torch.sigmoid(lse - sinks.to(lse.dtype))
