"""Micro-batches: rollouts cut to a size, laid out as rows, with the positions that are trained.

Invariant: how a batch is cut changes time and memory, never the gradient (N1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.records import Batch


@dataclass(frozen=True)
class MicroBatch:
    """R rollouts as rows padded on the right to L tokens, and their T trained tokens as flat positions.

    A trained token at (row, column) is predicted from the hidden state at (row, column - 1).
    """

    index: np.ndarray
    """Positions of the rollouts in the batch, int64 [R]."""
    input_ids: torch.Tensor
    """int64 [R, L]"""
    attention_mask: torch.Tensor
    """int64 [R, L], 1 for tokens, 0 for padding"""
    position_ids: torch.Tensor
    """int64 [R, L]"""
    row: torch.Tensor
    """int64 [T]"""
    column: torch.Tensor
    """int64 [T]"""
    targets: torch.Tensor
    """int64 [T], the trained tokens"""
    temperature: torch.Tensor
    """float32 [T], what logits are divided by"""
    flat: np.ndarray
    """int64 [T], the trained tokens among all tokens of the R rollouts, one after the other"""

    def gather(self, columns: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A token column of the batch at the trained tokens, [T] on the device."""
        values = np.concatenate([columns[i] for i in self.index])[self.flat]
        return torch.as_tensor(values, dtype=dtype).to(self.targets.device)

    def scatter(self, values: torch.Tensor, columns: Sequence[np.ndarray]) -> None:
        """Write [T] values into a token column of the batch."""
        joined = np.concatenate([columns[i] for i in self.index])
        joined[self.flat] = values.float().cpu().numpy()
        for i, part in zip(
            self.index, np.split(joined, np.cumsum([len(columns[i]) for i in self.index])[:-1]), strict=True
        ):
            columns[i][:] = part


def cut(lengths: np.ndarray, size: int | None, tokens: int | None) -> list[np.ndarray]:
    """Positions of rollouts, longest first, in micro-batches of at most `size` rollouts or `tokens` unpadded tokens.

    A rollout longer than the budget gets a micro-batch of its own. Neighbours in length share rows, so padding is small.
    """
    order = np.argsort(-lengths, kind="stable")
    if size is not None:
        return [order[i : i + size] for i in range(0, len(order), size)]
    if tokens is None:
        return [order] if len(order) else []
    cuts: list[np.ndarray] = []
    current: list[int] = []
    used = 0
    for i in order:
        if current and used + lengths[i] > tokens:
            cuts.append(np.asarray(current))
            current, used = [], 0
        current.append(i)
        used += int(lengths[i])
    return [*cuts, np.asarray(current)] if current else cuts


def rows_of(
    batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], pad_id: int, device: torch.device
) -> MicroBatch:
    """Lay out the rollouts at `index`; `trained[i]` is bool [T_i] and marks the tokens that any component trains."""
    rollouts = [batch.rollouts[i] for i in index]
    length = max(len(r) for r in rollouts)
    ids = np.full((len(index), length), pad_id, dtype=np.int64)
    mask = np.zeros((len(index), length), dtype=np.int64)
    rows, columns = [], []
    for r, (i, rollout) in enumerate(zip(index, rollouts, strict=True)):
        ids[r, : len(rollout)] = rollout.token_ids
        mask[r, : len(rollout)] = 1
        places = np.flatnonzero(trained[i])
        if len(places) and places[0] == 0:
            raise ValueError(
                f"rollout {rollout.id}: its first token is to be trained, and it has no context to be predicted from"
            )
        rows.append(np.full(len(places), r, dtype=np.int64))
        columns.append(places)
    row, column = np.concatenate(rows), np.concatenate(columns)
    temperature = np.asarray([r.temperature for r in rollouts], dtype=np.float32)
    starts = np.concatenate([[0], np.cumsum([len(r) for r in rollouts])[:-1]])

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        index=np.asarray(index),
        input_ids=put(ids),
        attention_mask=put(mask),
        position_ids=torch.arange(length, device=device).expand(len(index), -1),
        row=put(row),
        column=put(column),
        targets=put(ids[row, column]),
        temperature=put(temperature[row]),
        flat=starts[row] + column,
    )
