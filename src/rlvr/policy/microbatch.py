"""Micro-batches: rollouts cut to a size, laid out as rows, with the positions that are trained.

Rows are padded, or packed: rollouts laid end to end without padding, a prefix that a group's rollouts have in common
computed once. `micro_batches` chooses: what `optim.packing` and `optim.share_prefix` demand, and where they leave it
open, what costs least by an estimate. Invariant: how a batch is cut and laid out changes time and memory, never the
gradient (N1).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.device_memory import to_device
from rlvr.errors import ConfigError
from rlvr.policy.attention import Segments, Spans
from rlvr.policy.attention.kernels import takes_any_length
from rlvr.policy.attention.packed_rows import Shared, runs_of, shared_prefixes
from rlvr.policy.attention_speed import ELSEWHERE, MEASURED, SPEEDS, AttentionSpeed
from rlvr.policy.layer_sizes import LayerSizes
from rlvr.policy.model import Policy
from rlvr.records import Batch

log = logging.getLogger(__name__)

# On a CPU packed attention gathers stretches into blocks, which the estimate does not count. 8 to 14 % of an update of
# equal short rollouts (W1) was measured with the attention before this one, and nothing since. Elsewhere attention
# mostly takes stretches of any length, and nothing is gathered.
GAIN = {"cpu": 0.85}
"""Packed rows are taken where their estimate is at most this share of the padded rows', by kind of device."""
TIE = 1 + 1e-6
"""The share on every other kind of device: of two estimates that are equal but for rounding, the packed rows' wins."""


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
    return cut_shared(lengths, Shared.nothing(len(lengths)), size, tokens)


def cut_shared(
    lengths: np.ndarray, shared: Shared, size: int | None, tokens: int | None, windows: Sequence[int] = ()
) -> list[np.ndarray]:
    """`cut` for rollouts that begin with what their cluster has in common, which counts once in a micro-batch.

    Clusters stay together where the budget lets them; that with the longest rollout comes first, and in it the longest,
    branch by branch. Layers with one of `windows` copy the end of the prefix for each member; `tokens` bounds the keys
    that they get so, which are more than the row's tokens.
    """
    # A window that covers the longest rollout is none (`Spans.segments`).
    window = max((window for window in windows if window < lengths.max(initial=0)), default=0)
    cluster = shared.cluster
    prefix = shared.prefix
    longest = np.zeros(int(cluster.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(longest, cluster, lengths)
    # The last key sorts first: cluster by its longest member, then by number, then the members by branch and length.
    order = np.lexsort((-lengths, shared.branch, cluster, -longest[cluster]))
    cuts: list[list[int]] = []
    used = 0
    last = -1
    for i in order:
        own = int(lengths[i] - prefix[i])
        copied = min(window - 1, int(prefix[i])) if window else 0
        # The prefix counts once in a micro-batch, with the first member of the cluster.
        extra = own if cuts and cluster[i] == last else int(lengths[i])
        full = not cuts or (size is not None and len(cuts[-1]) == size)
        if full or (tokens is not None and used + extra + copied > tokens):
            cuts.append([])
            used = 0
            # A new micro-batch computes the prefix again.
            extra = int(lengths[i])
        cuts[-1].append(int(i))
        used += extra + copied
        last = cluster[i]
    return [np.asarray(part) for part in cuts]


def packed_row(
    batch: Batch, index: np.ndarray, trained: Sequence[np.ndarray], shared: Shared, device: torch.device
) -> MicroBatch:
    """The rollouts at `index` as one row, in which each shared run is computed once."""
    tokens = Tokens.of(batch, index, trained)
    runs = runs_of(tokens.lengths, shared, device)
    ids = np.concatenate([batch.rollouts[index[r]].token_ids[first:end] for r, first, end in runs.segments])
    # The token before predicts it, which may lie in a shared run: the prompt's last token predicts the first token of
    # every response. `flat` counts the tokens of the rollouts one after the other, as the places do here.
    source = np.concatenate(runs.places)[tokens.flat - 1]
    return tokens.laid_out(batch, index, ids[None], runs.spans.positions[None], source, device, runs.spans)


def speed_of(device: torch.device) -> AttentionSpeed:
    """The speed of attention on a device: what was measured on a GPU of this name, else the defaults of its class."""
    kind = device.type
    if kind == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        if name in MEASURED:
            return MEASURED[name]
        kind = next((known for known in SPEEDS if known in name), kind)
    return SPEEDS.get(kind, ELSEWHERE)


@dataclass(frozen=True)
class Cost:
    """The cost of a forward pass in tokens: the time that the layers take for one token without attention."""

    pair: float
    """A query and a key that it sees, in one layer."""
    call: float
    """An attention call, in one layer."""
    in_blocks: bool
    """True: packed attention pads stretches to blocks, each a call. False: it takes stretches of any length."""
    layers: tuple[tuple[int | None, int], ...] = ((None, 1),)
    """The windows of attention layers (None: full attention), each with the number of layers that have it"""

    @classmethod
    def of(cls, policy: Policy) -> Cost:
        """Of a policy on its device."""
        device = policy.device
        layers = policy.layers
        # A GPU without flash attention for this model or type has tiles, as any other device.
        flash = device.type == "cuda" and takes_any_length(device, policy.dtype, layers.width, layers.capped)
        return cls.of_layers(layers, speed_of(device), not flash)

    @classmethod
    def of_layers(cls, layers: LayerSizes, speed: AttentionSpeed, in_blocks: bool) -> Cost:
        """From the sizes of a model's layers: 2 FLOPs for each weight of a layer and token, 4 for each pair and
        channel."""
        flops = 2 * layers.weights
        # In tokens: FLOPs over those of the layers for one token. A pair is a multiplication and an addition in each of
        # q k^T and the product with v, for each channel.
        pair = 4 * layers.channels * speed.pair / flops
        windows = Counter(None if math.isinf(window) else int(window) for window in layers.windows)
        return cls(pair, speed.call / flops, in_blocks, tuple(windows.items()))

    @property
    def level(self) -> float:
        """An attention call in every layer."""
        return self.call * sum(layers for _, layers in self.layers)

    def padded(self, lengths: np.ndarray) -> float:
        """Rollouts of these lengths as padded rows: one causal call over [R, longest] in each layer."""
        longest = np.full(len(lengths), lengths.max())
        return float(self.alone(longest).sum()) + self.level

    def packed(self, spans: Spans) -> float:
        """One row of these spans: the calls that are made in layers with each window."""
        cost = float(spans.length.sum())
        for window, layers in self.layers:
            for part in spans.segments(window):
                pairs = _block_pairs(part) if self.in_blocks else call_pairs(part)
                calls = len(part.members) if self.in_blocks else 1
                cost += layers * (self.pair * pairs + self.call * calls)
        return cost

    def alone(self, lengths: np.ndarray) -> np.ndarray:
        """Each rollout for itself, without what a call costs: what to balance ranks by."""
        pairs = sum(layers * causal_pairs(lengths, lengths, window) for window, layers in self.layers)
        return lengths + self.pair * pairs


def causal_pairs(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """int64 [n]: the pairs of a query and a key that it sees, of causal stretches [n] whose last query sees all keys,
    or the last `window`."""
    before = keys - queries
    # Query i of a stretch, counted from 0, sees before + i + 1 keys without a window.
    every = queries * before + queries * (queries + 1) // 2
    if window is None:
        return every
    # Of these, what lies further away than the window: the queries with more than `window` keys.
    beyond = np.maximum(keys - window, 0)
    first = np.maximum(before + 1 - window, 0)
    # Sum over queries of max(before + i + 1 - window, 0): from the larger of `first` and 1 up to `beyond`.
    hidden = beyond * (beyond + 1) // 2 - np.maximum(first - 1, 0) * np.maximum(first, 0) // 2
    return every - hidden


def call_pairs(part: Segments) -> int:
    """Pairs of a query and a key that it sees."""
    if not part.causal:
        return int((part.query_length * part.key_length).sum())
    return int(causal_pairs(part.query_length, part.key_length, part.window).sum())


def _block_pairs(part: Segments) -> int:
    """Pairs of a call in blocks, each of whose stretches counts as the longest of its block."""
    # int64 [blocks]
    rows = np.asarray([len(members) for members in part.members])
    queries = np.asarray([part.query_length[members].max() for members in part.members])
    keys = np.asarray([part.key_length[members].max() for members in part.members])
    pairs = causal_pairs(queries, keys, part.window) if part.causal else queries * keys
    return int((rows * pairs).sum())


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
    limit = policy.layers.one_rope_up_to
    for key, wanted, possible in demanded:
        if wanted is True and not possible:
            raise ConfigError(f"optim.{key} is true, and this model cannot: {packing.reason}; set it to auto")
        if wanted is True and limit < math.inf:
            raise ConfigError(
                f"optim.{key} is true, and beyond {limit:.0f} tokens this model's rotary angles depend on the longest "
                "row of a micro-batch (rope_type dynamic or longrope), so that such rows are padded; set it to auto, "
                "which packs shorter ones"
            )


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
        longest = int(self.lengths.max())
        limit = self.policy.layers.one_rope_up_to
        if longest > limit:
            # check_packing refuses such a model where packing is demanded.
            _warn_once(
                f"rows are padded, not packed, where one is longer than {limit:.0f} tokens: its rotary angles "
                "then depend on the longest row (rope_type dynamic or longrope)"
            )
            return self._padded()
        plain = None if demanded else self._padded()
        # Demanded packing has nothing to be compared with, and no estimate justifies memory that grows with the square
        # of the tokens.
        most = math.inf
        if plain is not None and longest <= self.policy.layers.masked_beyond:
            most = GAIN.get(self.policy.device.type, TIE) * plain.cost
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
            yield self._packed(Shared.nothing(len(self.index)))
        if shares is not False:
            shared = shared_prefixes(self.batch, self.index, worth=self.estimate.level)
            if shares is True or any(shared.trunks):
                yield self._packed(shared)

    def _padded(self) -> _Layout:
        pad_id = int(self.policy.tokenizer.pad_token_id or 0)
        parts = cut(self.lengths, *self.limits)
        cost = sum(self.estimate.padded(self.lengths[part]) for part in parts)
        return _Layout(
            cost, parts, lambda part: rows_of(self.batch, self.index[part], self.trained, pad_id, self.policy.device)
        )

    def _packed(self, shared: Shared) -> _Layout:
        windows = [window for window, _ in self.estimate.layers if window is not None]
        parts = cut_shared(self.lengths, shared, *self.limits, windows)
        cost = 0.0
        for part in parts:
            cost += self.estimate.packed(runs_of(self.lengths[part], shared.select(part), self.policy.device).spans)

        def rows(part: np.ndarray) -> MicroBatch:
            return packed_row(self.batch, self.index[part], self.trained, shared.select(part), self.policy.device)

        return _Layout(cost, parts, rows, shares=any(shared.trunks))


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
