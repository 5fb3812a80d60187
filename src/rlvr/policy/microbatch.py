"""Micro-batches: rollouts cut to a size, laid out as rows, with the positions that are trained.

Rows are padded, or packed: rollouts laid end to end without padding, a prefix that a group's rollouts have in common
computed once. `micro_batches` chooses: what `optim.packing` and `optim.share_prefix` demand, and where they leave it
open, what costs least by an estimate. Invariant: how a batch is cut and laid out changes time and memory, never the
gradient (N1).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.device_memory import to_device
from rlvr.errors import ConfigError
from rlvr.policy.attention import Spans, blocks_of
from rlvr.policy.model import Policy
from rlvr.records import Batch

log = logging.getLogger(__name__)

# The gathers of packed attention cost 8 to 14 % where there is no padding to save (docs/performance.md, W1); the
# estimate does not count them.
GAIN = 0.85
"""Packed rows are taken where their estimate is at most this share of the padded rows'."""
# Orders of magnitude. Larger values favour padded rows, which make one call; `scripts/gpu/stages/attention.py` measures
# what they should be on a GPU.
CALL = {"cpu": 5e6}
"""FLOPs of a forward pass that take as long as the start of one attention call, by kind of device."""
CALL_ELSEWHERE = 2e10
"""The same for every other kind of device. It is larger, since they compute fast relative to the start of a call."""


@dataclass(frozen=True)
class ComputedPass:
    """The sizes of a pass over a micro-batch, of which its operations are counted."""

    length: np.ndarray
    """int64 [S]: the runs of tokens that are computed; no padding"""
    context: np.ndarray
    """int64 [S]: the tokens before each run that it sees"""
    projected: int
    """Tokens whose logits are computed."""
    grad: bool
    """True if a backward pass follows."""


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
    """The spans of a packed row within which tokens see each other."""

    def computed(self, grad: bool) -> ComputedPass:
        """The sizes of a forward pass, with a backward pass or without."""
        if self.spans is None:
            return ComputedPass(self.lengths, np.zeros_like(self.lengths), len(self.flat), grad)
        return ComputedPass(self.spans.length, self.spans.context_length, len(self.flat), grad)

    def at_trained(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """A token column of the batch at the trained tokens, float32 [T] in host memory."""
        return np.concatenate([columns[i] for i in self.index])[self.flat].astype(np.float32, copy=False)


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
        # int64 [T]: the last rollout that starts at or before the token.
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
        spans: Spans | None = None,
    ) -> MicroBatch:
        """The micro-batch of these tokens with the given rows."""
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
        # All arrays by one copy, for which the host does not wait.
        put = dict(zip(arrays, to_device(list(arrays.values()), device), strict=True))
        return MicroBatch(
            index=np.asarray(index),
            flat=self.flat,
            target_range=(int(targets.min()), int(targets.max())) if len(targets) else (0, 0),
            common_temperature=float(temperature[0]) if (temperature == temperature[:1]).all() else None,
            lengths=self.lengths,
            spans=spans,
            **put,
        )


def rows_of(
    batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], pad_id: int, device: torch.device
) -> MicroBatch:
    """The rollouts at `index` as padded rows; `trained[i]` is bool [T_i] and marks the tokens that any component
    trains."""
    tokens = Tokens.of(batch, index, trained)
    # [L]
    steps = np.arange(tokens.lengths.max())
    # bool [R, L]; row-major, so that assigning by it fills the rows with the rollouts' ids in order.
    real = steps < tokens.lengths[:, None]
    ids = np.full(real.shape, pad_id, dtype=np.int64)
    ids[real] = tokens.ids
    width = int(tokens.column.max(initial=1))  # what comes after the last token that predicts one is seen by nothing
    positions = np.repeat(steps[None, :width], len(index), axis=0)
    # The hidden state at the token before predicts it. The place is in the flattened [R * width].
    source = tokens.row * width + tokens.column - 1
    return tokens.laid_out(batch, index, np.ascontiguousarray(ids[:, :width]), positions, source, device)


def cut(lengths: np.ndarray, size: int | None, tokens: int | None) -> list[np.ndarray]:
    """Positions of rollouts, longest first, in micro-batches of at most `size` rollouts or `tokens` unpadded tokens.

    A rollout longer than the budget gets a micro-batch of its own. Neighbours in length share rows, so padding is
    small.
    """
    return cut_shared(lengths, np.zeros_like(lengths), np.arange(len(lengths)), size, tokens)


def cut_shared(
    lengths: np.ndarray, prefix: np.ndarray, cluster: np.ndarray, size: int | None, tokens: int | None
) -> list[np.ndarray]:
    """`cut` for rollouts whose first `prefix` tokens are common to their cluster and count once in a micro-batch.

    Clusters stay together where the budget lets them; that with the longest rollout comes first, and in it the longest.
    """
    longest = np.zeros(int(cluster.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(longest, cluster, lengths)
    # The last key sorts first: cluster by its longest member, then by number, then the members by length.
    order = np.lexsort((-lengths, cluster, -longest[cluster]))
    cuts: list[list[int]] = []
    used = 0
    last = -1
    for i in order:
        own = int(lengths[i] - prefix[i])
        # The prefix counts once in a micro-batch, with the first member of the cluster.
        extra = own if cuts and cluster[i] == last else int(lengths[i])
        full = not cuts or (size is not None and len(cuts[-1]) == size)
        if full or (tokens is not None and used + extra > tokens):
            cuts.append([])
            used = 0
            # A new micro-batch computes the prefix again.
            extra = int(lengths[i])
        cuts[-1].append(int(i))
        used = used + extra
        last = cluster[i]
    return [np.asarray(part) for part in cuts]


@dataclass(frozen=True)
class Cost:
    """The cost of a forward pass in tokens: the time that the layers take for one token without attention."""

    pair: float
    """A query and a key that meet, in all layers."""
    call: float
    """An attention call, in all layers."""

    @classmethod
    def of(cls, policy: Policy) -> Cost:
        """From the sizes of the model's layers: 2 FLOPs for each weight of a layer and token, 4 for each pair and
        channel."""
        layers = policy.layers
        call = CALL.get(policy.device.type, CALL_ELSEWHERE)
        flops = 2 * layers.weights
        # In tokens: FLOPs over those of the layers for one token. A pair is a multiplication and an addition in each of
        # q k^T and the product with v, for each channel.
        return cls(pair=4 * layers.count * layers.channels / flops, call=layers.count * call / flops)

    def padded(self, lengths: np.ndarray) -> float:
        """Rollouts of these lengths as padded rows."""
        longest = int(lengths.max())
        # One causal call over [R, longest]; the whole square is counted, here and in `packed`, since only the ratio
        # matters.
        return len(lengths) * (longest + self.pair * longest**2) + self.call

    def packed(self, length: np.ndarray, context: np.ndarray) -> float:
        """One row of runs of these lengths, with contexts of these lengths."""
        pairs = 0
        blocks = blocks_of(length, context)
        for block in blocks:
            own = int(length[block].max())
            before = int(context[block].max())
            pairs += len(block) * own * (own + before)
        return float(length.sum()) + self.pair * pairs + self.call * len(blocks)

    def alone(self, lengths: np.ndarray) -> np.ndarray:
        """Each rollout for itself: what to balance ranks by."""
        return lengths + self.pair * lengths**2


def shared_prefixes(batch: Batch, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cluster, prefix), int64: each rollout's group, numbered from 0, and the tokens that all of that group begin
    with.

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
    # bool [shortest]: places at which all have the token of the first.
    same = np.all([one[:shortest] == ids[0][:shortest] for one in ids[1:]], axis=0)
    if same.all():
        return shortest
    return int(np.argmin(same))


@dataclass(frozen=True)
class _Runs:
    """The division of R rollouts of a micro-batch into S runs of one row."""

    spans: Spans
    segments: list[tuple[int, int, int]]
    """(rollout, first token, past the last token) of each run"""
    prefix: np.ndarray
    """int64 [R]: the tokens of each rollout that lie in its context's run"""
    prefix_start: np.ndarray
    """int64 [R]: the place of its first one"""
    own_start: np.ndarray
    """int64 [R]: the place of the token after them"""


def _runs(lengths: np.ndarray, prefix: np.ndarray, cluster: np.ndarray, device: torch.device) -> _Runs:
    """Runs of rollouts that come cluster by cluster. A rollout alone in its cluster is one run without a context."""
    count = np.bincount(cluster)
    prefix = np.where(count[cluster] > 1, prefix, 0)
    segments: list[tuple[int, int, int]] = []
    context: list[int] = []
    prefix_start = np.zeros(len(lengths), dtype=np.int64)
    own_start = np.zeros(len(lengths), dtype=np.int64)
    place = 0
    last = -1
    shared = -1
    start = 0
    for r in range(len(lengths)):
        if prefix[r] and cluster[r] != last:
            # The first rollout of a cluster lays the prefix down as a run of its own; the others refer to that run.
            shared = len(segments)
            start = place
            segments.append((r, 0, int(prefix[r])))
            context.append(-1)
            place += int(prefix[r])
        last = int(cluster[r])
        prefix_start[r] = start
        own_start[r] = place
        # A rollout may be nothing but the prefix (an empty response) and then has no run of its own.
        if lengths[r] > prefix[r]:
            segments.append((r, int(prefix[r]), int(lengths[r])))
            context.append(shared if prefix[r] else -1)
            place += int(lengths[r] - prefix[r])
    length = np.asarray([end - first for _, first, end in segments], dtype=np.int64)
    spans = Spans(length, np.asarray(context, dtype=np.int64), device)
    return _Runs(spans, segments, prefix, prefix_start, own_start)


def packed_row(
    batch: Batch,
    index: np.ndarray,
    trained: Sequence[np.ndarray],
    prefix: np.ndarray,
    cluster: np.ndarray,
    device: torch.device,
) -> MicroBatch:
    """The rollouts at `index` as one row; the first `prefix` tokens are common to those of a cluster, which come
    together."""
    tokens = Tokens.of(batch, index, trained)
    runs = _runs(tokens.lengths, prefix, cluster, device)
    ids = np.concatenate([batch.rollouts[index[r]].token_ids[first:end] for r, first, end in runs.segments])
    row = tokens.row
    # int64 [T]: the place, in its rollout, of the token that predicts.
    before = tokens.column - 1
    own = runs.own_start[row] + before - runs.prefix[row]
    # It may lie in the shared run: the prompt's last token predicts the first token of every response.
    source = np.where(before < runs.prefix[row], runs.prefix_start[row] + before, own)
    return tokens.laid_out(batch, index, ids[None], runs.spans.positions[None], source, device, runs.spans)


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
    layouts = _Layouts(policy, batch, index, trained, config)
    budget = token_limit(config)
    if budget is not None and int(layouts.lengths.max()) > budget:
        _warn_once(f"optim.micro_batch_tokens is {budget}, which some rollouts exceed: each of those goes alone")
    layout = layouts.cheapest()
    for part in layout.parts:
        yield layout.rows(part)


def token_limit(optim: OptimConfig) -> int | None:
    """`micro_batch_tokens` as a number; None where it is still `auto`, which a run resolves at its start."""
    if optim.micro_batch_tokens == "auto":
        return None
    return optim.micro_batch_tokens


def check_packing(policy: Policy, config: OptimConfig) -> None:
    """ConfigError where `config` demands packing or sharing and the model cannot: it says why."""
    packing = policy.packing
    demanded = (("packing", config.packing, packing.packs), ("share_prefix", config.share_prefix, packing.shares))
    for key, wanted, possible in demanded:
        if wanted is True and not possible:
            raise ConfigError(f"optim.{key} is true, and this model cannot: {packing.reason}; set it to auto")


@dataclass(frozen=True)
class _Layout:
    """A layout of an optimizer step's rollouts: its cost, its cuts and the rows of a cut."""

    cost: float
    parts: list[np.ndarray]
    rows: Callable[[np.ndarray], MicroBatch]
    shares: bool = False


class _Layouts:
    """The rollouts at `index`, and the ways to lay them out."""

    def __init__(
        self, policy: Policy, batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], config: OptimConfig
    ) -> None:
        self.policy = policy
        self.batch = batch
        self.index = index
        self.trained = trained
        self.config = config
        self.lengths = np.asarray([len(batch.rollouts[i]) for i in index], dtype=np.int64)
        self.limits = (config.micro_batch_size, token_limit(config))
        self.estimate = Cost.of(policy)

    def cheapest(self) -> _Layout:
        """The cheapest layout that config and model allow; the model is asked only where packing would pay."""
        demanded = self.config.packing is True or self.config.share_prefix is True
        plain = None if demanded else self._padded()
        # Demanded packing has nothing to be compared with.
        most = math.inf if plain is None else GAIN * plain.cost
        better = [layout for layout in self._all_packed(most) if layout.cost <= most]
        # `packing` runs the model on a trial, so it is read only where its answer decides.
        if plain is not None and better and not self.policy.packing.packs:
            _warn_once(f"rows are padded, not packed: {self.policy.packing.reason}")
            return plain
        better = [layout for layout in better if self.policy.packing.shares or not layout.shares]
        if better or plain is None:
            return min(better, key=lambda layout: layout.cost)
        return plain

    def _all_packed(self, most: float) -> Iterator[_Layout]:
        """The packed layouts that config allows, but for those whose tokens alone cost over `most`."""
        if self.config.packing is False:
            return
        shares = self.config.share_prefix
        total = int(self.lengths.sum())
        if shares is not True and total <= most:
            yield self._packed(np.arange(len(self.index)), np.zeros_like(self.lengths))
        if shares is not False:
            cluster, prefix = shared_prefixes(self.batch, self.index)
            # [clusters]: the prefix of each cluster's first member; computed once instead of once for each member.
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
            spans = _runs(self.lengths[part], prefix[part], cluster[part], self.policy.device).spans
            cost += self.estimate.packed(spans.length, spans.context_length)

        def rows(part: np.ndarray) -> MicroBatch:
            return packed_row(
                self.batch, self.index[part], self.trained, prefix[part], cluster[part], self.policy.device
            )

        return _Layout(cost, parts, rows, shares=bool(prefix.any()))


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
