"""Micro-batches: rollouts cut to a size, laid out as rows, with the positions that are trained.

Rows are padded (here) or packed (rlvr.policy.packing). Invariant: how a batch is cut and laid out changes time and memory,
never the gradient (N1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.policy.attention import Spans
from rlvr.policy.transfer import to_device
from rlvr.records import Batch


@dataclass(frozen=True)
class MicroBatch:
    """The tokens of some rollouts as rows [R, L], and their T trained tokens.

    Padded: a row for each rollout, padded on the right, which no real token sees. Packed: one row of `spans`.
    """

    index: np.ndarray
    """Positions of the rollouts in the batch, int64."""
    input_ids: torch.Tensor
    """int64 [R, L]"""
    position_ids: torch.Tensor
    """int64 [R, L]"""
    row: torch.Tensor
    """int64 [T], the rollout of each trained token, as a place in `index`"""
    source: torch.Tensor
    """int64 [T], the place in the R * L tokens whose hidden state predicts it; one may predict several tokens"""
    targets: torch.Tensor
    """int64 [T], the trained tokens"""
    temperature: torch.Tensor
    """float32 [T], what logits are divided by"""
    flat: np.ndarray
    """int64 [T], the trained tokens among all tokens of the rollouts, one after the other"""
    target_range: tuple[int, int]
    """The smallest and the largest of `targets`, known on the host; (0, 0) without any"""
    common_temperature: float | None
    """The temperature of every trained token, known on the host; None where they differ"""
    lengths: np.ndarray
    """int64 [R], the tokens of each rollout"""
    spans: Spans | None = None
    """Which tokens of a packed row see each other."""

    @property
    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """(length, context), int64 [S]: the runs of tokens that are computed, each after a context that it sees; no padding."""
        if self.spans is None:
            return self.lengths, np.zeros_like(self.lengths)
        return self.spans.length, self.spans.context_length

    def at_trained(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """A token column of the batch at the trained tokens, float32 [T] in host memory."""
        return np.concatenate([columns[i] for i in self.index])[self.flat].astype(np.float32, copy=False)


class DeferredColumns:
    """Values at trained tokens that are to be written into token columns of the batch.

    They stay on the device until `write` fetches those of all micro-batches by one copy, which the host has to wait for.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]] = []
        self._values: list[torch.Tensor] = []

    def add(self, rows: MicroBatch, values: torch.Tensor, columns: Sequence[np.ndarray]) -> None:
        """Write [T] values of a micro-batch later."""
        self._parts.append((rows.index, rows.flat, columns))
        self._values.append(values.detach().float())

    def write(self) -> None:
        """Write all that was added."""
        if not self._parts:
            return
        fetched = torch.cat(self._values).cpu().numpy()
        cuts = np.cumsum([len(flat) for _, flat, _ in self._parts])[:-1]
        for (index, flat, columns), values in zip(self._parts, np.split(fetched, cuts), strict=True):
            joined = np.concatenate([columns[i] for i in index])
            joined[flat] = values
            for i, part in zip(index, np.split(joined, np.cumsum([len(columns[i]) for i in index])[:-1]), strict=True):
                columns[i][:] = part
        self._parts.clear()
        self._values.clear()


@dataclass(frozen=True)
class Tokens:
    """The tokens of some rollouts one after the other, and which of them are trained."""

    lengths: np.ndarray
    """int64 [R]"""
    ids: np.ndarray
    """int64, all tokens"""
    flat: np.ndarray
    """int64 [T], the trained ones"""
    row: np.ndarray
    """int64 [T], the rollout of each"""
    column: np.ndarray
    """int64 [T], its place in the rollout, at least 1"""

    @classmethod
    def of(cls, batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray]) -> Tokens:
        """Of the rollouts at `index`. ValueError names a rollout whose first token is to be trained."""
        lengths = np.asarray([len(batch.rollouts[i]) for i in index], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        flat = np.flatnonzero(np.concatenate([trained[i] for i in index]))
        row = np.searchsorted(starts, flat, side="right") - 1
        column = flat - starts[row]
        if not column.all():
            first = batch.rollouts[index[row[np.argmin(column)]]]
            raise ValueError(
                f"rollout {first.id}: its first token is to be trained, and it has no context to be predicted from"
            )
        return cls(lengths, np.concatenate([batch.rollouts[i].token_ids for i in index]), flat, row, column)

    def laid_out(
        self,
        batch: Batch,
        index: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        source: np.ndarray,
        device: torch.device,
    ) -> MicroBatch:
        """The micro-batch of these tokens with the given rows; `spans` are left out."""
        temperature = np.asarray([batch.rollouts[i].temperature for i in index], dtype=np.float32)
        targets = self.ids[self.flat]
        arrays = {
            "input_ids": ids,
            "position_ids": positions,
            "row": self.row,
            "source": source,
            "targets": targets,
            "temperature": temperature[self.row],
        }
        put = dict(zip(arrays, to_device(list(arrays.values()), device), strict=True))
        return MicroBatch(
            index=np.asarray(index),
            input_ids=put["input_ids"],
            position_ids=put["position_ids"],
            row=put["row"],
            source=put["source"],
            targets=put["targets"],
            temperature=put["temperature"],
            flat=self.flat,
            target_range=(int(targets.min()), int(targets.max())) if len(targets) else (0, 0),
            common_temperature=float(temperature[0]) if (temperature == temperature[:1]).all() else None,
            lengths=self.lengths,
        )


def rows_of(
    batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], pad_id: int, device: torch.device
) -> MicroBatch:
    """The rollouts at `index` as padded rows; `trained[i]` is bool [T_i] and marks the tokens that any component trains."""
    tokens = Tokens.of(batch, index, trained)
    steps = np.arange(tokens.lengths.max())
    real = steps < tokens.lengths[:, None]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = tokens.ids
    width = int(tokens.column.max(initial=1))  # what comes after the last token that predicts one is seen by nothing
    positions = np.repeat(steps[None, :width], len(index), axis=0)
    source = tokens.row * width + tokens.column - 1
    return tokens.laid_out(batch, index, np.ascontiguousarray(ids[:, :width]), positions, source, device)


def cut(lengths: np.ndarray, size: int | None, tokens: int | None) -> list[np.ndarray]:
    """Positions of rollouts, longest first, in micro-batches of at most `size` rollouts or `tokens` unpadded tokens.

    A rollout longer than the budget gets a micro-batch of its own. Neighbours in length share rows, so padding is small.
    """
    nothing = np.zeros_like(lengths)
    return cut_shared(lengths, nothing, np.arange(len(lengths)), size, tokens)


def cut_shared(
    lengths: np.ndarray, prefix: np.ndarray, cluster: np.ndarray, size: int | None, tokens: int | None
) -> list[np.ndarray]:
    """`cut` for rollouts whose first `prefix` tokens are common to their cluster and count once in a micro-batch.

    Clusters stay together where the budget lets them; that with the longest rollout comes first, and in it the longest.
    """
    longest = np.zeros(int(cluster.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(longest, cluster, lengths)
    order = np.lexsort((-lengths, cluster, -longest[cluster]))
    cuts: list[list[int]] = []
    used, last = 0, -1
    for i in order:
        own = int(lengths[i] - prefix[i])
        extra = own if cuts and cluster[i] == last else int(lengths[i])
        full = not cuts or (size is not None and len(cuts[-1]) == size)
        if full or (tokens is not None and used + extra > tokens):
            cuts.append([])
            used, extra = 0, int(lengths[i])
        cuts[-1].append(int(i))
        used, last = used + extra, cluster[i]
    return [np.asarray(part) for part in cuts]


def deal(costs: np.ndarray, world: int) -> list[np.ndarray]:
    """Positions for each of `world` ranks, in ascending order, so that the dearest rank is little dearer than the mean.

    The dearest item goes first, each to the rank with the least so far (Graham 1969: at most 4/3 of the best possible).
    The same costs give the same deal on every rank.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    totals = np.zeros(world)
    for i in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin(totals))
        ranks[rank].append(int(i))
        totals[rank] += costs[i]
    return [np.sort(np.asarray(rank, dtype=np.int64)) for rank in ranks]
