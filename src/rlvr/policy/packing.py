"""Packed rows: rollouts laid end to end without padding, a prefix that a group's rollouts have in common computed once.

`micro_batches` chooses between padded rows, packed rows, and packed rows with shared prefixes: what `optim.packing` and
`optim.share_prefix` demand, and where they leave it open, what costs least by an estimate. Invariant: the choice changes
time and memory, never the gradient (N1).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.errors import ConfigError
from rlvr.policy.attention import Spans, blocks_of
from rlvr.policy.microbatch import MicroBatch, Tokens, cut, cut_shared, rows_of
from rlvr.policy.model import Policy
from rlvr.records import Batch

log = logging.getLogger(__name__)

GAIN = 0.85
"""Packed rows are taken where their estimate is at most this share of the padded rows'."""
CALL = {"cpu": 5e6}
"""Forward FLOPs that take as long as starting one attention call does, by kind of device ..."""
CALL_ELSEWHERE = 2e10
"""... and on those that are so fast that starting is dear."""


@dataclass(frozen=True)
class Cost:
    """What a forward pass costs, in tokens: the time that the layers take for one token without attention."""

    pair: float
    """A query and a key that meet, in all layers."""
    call: float
    """An attention call, in all layers."""

    @classmethod
    def of(cls, policy: Policy) -> Cost:
        """From the sizes of the model's layers: 2 FLOPs for each weight of a layer and token, 4 for each pair and channel."""
        config = policy.causal_lm.config.get_text_config()
        skipped = {id(policy.causal_lm.get_input_embeddings().weight)}
        head = policy.causal_lm.get_output_embeddings()
        skipped |= {id(head.weight)} if head is not None else set()
        weights = sum(getattr(p, "ds_numel", p.numel()) for p in policy.causal_lm.parameters() if id(p) not in skipped)
        layers = getattr(config, "num_hidden_layers", 1)
        heads = getattr(config, "num_attention_heads", 1)
        channels = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        call = CALL.get(policy.device.type, CALL_ELSEWHERE)
        return cls(pair=4 * layers * channels / (2 * weights), call=layers * call / (2 * weights))

    def padded(self, lengths: np.ndarray) -> float:
        """Rollouts of these lengths as padded rows."""
        longest = int(lengths.max())
        return len(lengths) * (longest + self.pair * longest**2) + self.call

    def packed(self, length: np.ndarray, context: np.ndarray) -> float:
        """One row of runs of these lengths, with contexts of these lengths."""
        pairs, blocks = 0, blocks_of(length, context)
        for block in blocks:
            own, before = int(length[block].max()), int(context[block].max())
            pairs += len(block) * own * (own + before)
        return float(length.sum()) + self.pair * pairs + self.call * len(blocks)

    def alone(self, lengths: np.ndarray) -> np.ndarray:
        """Each rollout for itself: what to balance ranks by."""
        return lengths + self.pair * lengths**2


def shared_prefixes(batch: Batch, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cluster, prefix), int64: each rollout's group, numbered from 0, and the tokens that all of that group begin with.

    Found from the token ids of the rollouts at `index`; 0 where a rollout is alone.
    """
    numbers: dict[str, int] = {}
    cluster = np.asarray([numbers.setdefault(batch.rollouts[i].group, len(numbers)) for i in index], dtype=np.int64)
    prefix = np.zeros(len(index), dtype=np.int64)
    for number in range(len(numbers)):
        members = np.flatnonzero(cluster == number)
        if len(members) > 1:
            prefix[members] = _common([batch.rollouts[index[m]].token_ids for m in members])
    return cluster, prefix


def _common(ids: Sequence[np.ndarray]) -> int:
    """The length of the longest prefix that all have."""
    shortest = min(len(one) for one in ids)
    same = np.all([one[:shortest] == ids[0][:shortest] for one in ids[1:]], axis=0)
    return shortest if same.all() else int(np.argmin(same))


@dataclass(frozen=True)
class _Runs:
    """How the R rollouts of a micro-batch become S runs of one row."""

    length: np.ndarray
    """int64 [S]"""
    context: np.ndarray
    """int64 [S], as in Spans"""
    pieces: list[tuple[int, int, int]]
    """(rollout, first token, past the last token) of each run"""
    prefix: np.ndarray
    """int64 [R]: the tokens of each rollout that lie in its context's run"""
    prefix_start: np.ndarray
    """int64 [R]: the place of its first one"""
    own_start: np.ndarray
    """int64 [R]: the place of the token after them"""

    @property
    def context_length(self) -> np.ndarray:
        """int64 [S], 0 where there is none."""
        return np.where(self.context >= 0, self.length[self.context], 0)


def _runs(lengths: np.ndarray, prefix: np.ndarray, cluster: np.ndarray) -> _Runs:
    """Runs of rollouts that come cluster by cluster. A rollout alone in its cluster is one run without a context."""
    count = np.bincount(cluster)
    prefix = np.where(count[cluster] > 1, prefix, 0)
    pieces: list[tuple[int, int, int]] = []
    context: list[int] = []
    prefix_start, own_start = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
    place, last, shared, start = 0, -1, -1, 0
    for r in range(len(lengths)):
        if prefix[r] and cluster[r] != last:
            shared, start = len(pieces), place
            pieces.append((r, 0, int(prefix[r])))
            context.append(-1)
            place += int(prefix[r])
        last = int(cluster[r])
        prefix_start[r], own_start[r] = start, place
        if lengths[r] > prefix[r]:
            pieces.append((r, int(prefix[r]), int(lengths[r])))
            context.append(shared if prefix[r] else -1)
            place += int(lengths[r] - prefix[r])
    length = np.asarray([end - first for _, first, end in pieces], dtype=np.int64)
    return _Runs(length, np.asarray(context, dtype=np.int64), pieces, prefix, prefix_start, own_start)


def packed_row(
    batch: Batch,
    index: np.ndarray,
    trained: Sequence[np.ndarray],
    prefix: np.ndarray,
    cluster: np.ndarray,
    device: torch.device,
) -> MicroBatch:
    """The rollouts at `index` as one row; the first `prefix` tokens are common to those of a cluster, which come together."""
    tokens = Tokens.of(batch, index, trained)
    runs = _runs(tokens.lengths, prefix, cluster)
    spans = Spans(runs.length, runs.context, device)
    ids = np.concatenate([batch.rollouts[index[r]].token_ids[first:end] for r, first, end in runs.pieces])
    row, before = tokens.row, tokens.column - 1
    own = runs.own_start[row] + before - runs.prefix[row]
    source = np.where(before < runs.prefix[row], runs.prefix_start[row] + before, own)
    rows = tokens.laid_out(batch, index, ids[None], spans.positions[None], source, device)
    return dataclasses.replace(rows, spans=spans)


def micro_batches(
    policy: Policy, batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], config: OptimConfig
) -> Iterator[MicroBatch]:
    """The rollouts at `index` in micro-batches of the sizes and with the rows that `config` says.

    `trained[i]` is bool [T_i] and marks the tokens that any component trains. ConfigError where packing or sharing is
    demanded and the model cannot.
    """
    check_packing(policy, config)
    if not len(index):
        return
    work = _Work(policy, batch, index, trained, config)
    budget = config.token_limit
    if budget is not None and int(work.lengths.max()) > budget:
        _say_once(f"optim.micro_batch_tokens is {budget}, which some rollouts exceed: each of those goes alone")
    layout = work.cheapest()
    for part in layout.parts:
        yield layout.rows(part)


def check_packing(policy: Policy, config: OptimConfig) -> None:
    """ConfigError where `config` demands packing or sharing and the model cannot: it says why."""
    for key, can in (("packing", "packs"), ("share_prefix", "shares")):
        if getattr(config, key) is True and not getattr(policy.packing, can):
            raise ConfigError(f"optim.{key} is true, and this model cannot: {policy.packing.reason}; set it to auto")


@dataclass(frozen=True)
class _Layout:
    """A way to lay out an optimizer step's rollouts: what it costs, its cuts, and a cut's rows."""

    cost: float
    parts: list[np.ndarray]
    rows: Callable[[np.ndarray], MicroBatch]
    shares: bool = False


class _Work:
    """The rollouts at `index`, and the ways to lay them out."""

    def __init__(
        self, policy: Policy, batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], config: OptimConfig
    ) -> None:
        self.policy, self.batch, self.index, self.trained, self.config = policy, batch, index, trained, config
        self.lengths = np.asarray([len(batch.rollouts[i]) for i in index], dtype=np.int64)
        self.limits = (config.micro_batch_size, config.token_limit)
        self.estimate = Cost.of(policy)

    def cheapest(self) -> _Layout:
        """The cheapest layout that config and model allow; the model is asked only where packing would pay."""
        demanded = self.config.packing is True or self.config.share_prefix is True
        plain = None if demanded else self._padded()
        most = math.inf if plain is None else GAIN * plain.cost
        better = [layout for layout in self._all_packed(most) if layout.cost <= most]
        if plain is not None and better and not self.policy.packing.packs:
            _say_once(f"rows are padded, not packed: {self.policy.packing.reason}")
            return plain
        better = [layout for layout in better if self.policy.packing.shares or not layout.shares]
        return min(better, key=lambda layout: layout.cost) if better or plain is None else plain

    def _all_packed(self, most: float) -> Iterator[_Layout]:
        """The packed layouts that config allows, but for those whose tokens alone cost over `most`."""
        if self.config.packing is False:
            return
        shares, total = self.config.share_prefix, int(self.lengths.sum())
        if shares is not True and total <= most:
            yield self._packed(np.arange(len(self.index)), np.zeros_like(self.lengths))
        if shares is not False:
            cluster, prefix = shared_prefixes(self.batch, self.index)
            once = prefix[np.unique(cluster, return_index=True)[1]].sum()
            if total - prefix.sum() + once <= most and (shares is True or prefix.any()):
                yield self._packed(cluster, prefix)

    def _padded(self) -> _Layout:
        pad_id = int(self.policy.tokenizer.pad_token_id or 0)
        parts = cut(self.lengths, *self.limits)
        cost = sum(self.estimate.padded(self.lengths[part]) for part in parts)
        return _Layout(
            cost, parts, lambda part: rows_of(self.batch, self.index[part], self.trained, pad_id, self.policy.device)
        )

    def _packed(self, cluster: np.ndarray, prefix: np.ndarray) -> _Layout:
        parts = cut_shared(self.lengths, prefix, cluster, *self.limits)
        cost = 0.0
        for part in parts:
            runs = _runs(self.lengths[part], prefix[part], cluster[part])
            cost += self.estimate.packed(runs.length, runs.context_length)

        def rows(part: np.ndarray) -> MicroBatch:
            return packed_row(
                self.batch, self.index[part], self.trained, prefix[part], cluster[part], self.policy.device
            )

        return _Layout(cost, parts, rows, shares=bool(prefix.any()))


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.warning(message)
