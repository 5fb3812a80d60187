"""Calls whose stretches are laid side by side, padded, for kernels that take tensors [R, heads, length, width]; and
torch's flash attention for a CPU, which is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rlvr.policy.attention.calls import Block, Gradients, ScoreRule, Segments


class Dense(Protocol):
    """Computes stretches side by side: R of them, H heads of queries, G of keys and values. All have as many slots."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, H, L, D], [R, G, K, D], [R, G, K, E] -> the outputs [R, H, L, E], and their log-sum-exp [R, H, L]."""
        ...

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        """The gradients of queries, keys and values; `output` and `lse` may be merged (`kernels.Kernel`)."""
        ...


@dataclass(frozen=True)
class Padded:
    """A kernel for tensors [R, heads, length, width], to which stretches are laid side by side, padded."""

    dense: Dense

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for block in segments.blocks.blocks:
            output, lse = self.dense.forward(
                _side_by_side(query, block.take_queries, block),
                _side_by_side(key, block.take_keys, block),
                _side_by_side(value, block.take_keys, block),
                segments,
                scoring,
            )
            # [R, H, L, E] -> [R * L, H, E], and [R, H, L] -> [H, R * L].
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(0, 1).flatten(1))
        places = segments.blocks.places
        return torch.cat(outputs).index_select(0, places), torch.cat(sums, 1).index_select(1, places)

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        of_query: list[torch.Tensor] = []
        of_key = torch.zeros_like(key)
        of_value = torch.zeros_like(value)
        for block in segments.blocks.blocks:
            # [R, 1, L, 1]: padding has no gradient, and gives none to the keys that it sees.
            padding = ~block.real[:, None, :, None]
            given = _side_by_side(gradient, block.take_queries, block).masked_fill(padding, 0.0)
            sums = lse.index_select(1, block.take_queries).unflatten(1, (block.rows, -1)).transpose(0, 1)
            # Its probabilities are 0: with the sum of another query, which saw other keys, they may be infinite.
            sums = sums.masked_fill(~block.real[:, None, :], torch.inf)
            dq, dk, dv = self.dense.backward(
                given,
                _side_by_side(query, block.take_queries, block),
                _side_by_side(key, block.take_keys, block),
                _side_by_side(value, block.take_keys, block),
                _side_by_side(output, block.take_queries, block),
                sums,
                segments,
                scoring,
            )
            of_query.append(dq.transpose(1, 2).flatten(0, 1))
            of_key.index_add_(0, block.take_keys, dk.transpose(1, 2).flatten(0, 1))
            of_value.index_add_(0, block.take_keys, dv.transpose(1, 2).flatten(0, 1))
        return torch.cat(of_query).index_select(0, segments.blocks.places), of_key, of_value


def _side_by_side(x: torch.Tensor, index: torch.Tensor, block: Block) -> torch.Tensor:
    """[N, heads, D] -> [R, heads, the index's share, D]"""
    return x.index_select(0, index).unflatten(0, (block.rows, -1)).transpose(1, 2)


class CpuFlash:
    """torch's flash attention for a CPU, which `scaled_dot_product_attention` calls there, with its log-sum-exp."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, segments.causal, scale=scoring.scale
        )

    def backward(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scoring: ScoreRule,
    ) -> Gradients:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, lse, 0.0, segments.causal, scale=scoring.scale
        )
