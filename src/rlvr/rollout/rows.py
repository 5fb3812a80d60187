"""The rows of a batch that is being decoded: their key-value cache, the draws of their tokens, and what was sampled.

Rows come and go. They are aligned on the right, in the cache too: the newest token of each is in the last used slot,
and a shorter row has unused slots on the left, which the attention mask hides. A finished row stays, dead, until enough
of them pay for moving the others. What was sampled is kept on the host, what the model reads on its device. The cache
is for attention layers only (full or sliding window).

Invariant: a row's token depends on its own logits, options and uniform number only, so it does not change with the
batch.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rlvr.errors import ConfigError
from rlvr.rollout.engine import Completion, Request

# Arbitrary, not measured: growing copies the layer's cache once for every 64 tokens; fewer slots copy more often, more
# take memory that may never be used.
GROWTH = 64
"""Slots that are added at once when a layer is full."""


# transformers' DynamicLayer (cache_utils.py) joins old and new keys with torch.cat, which copies the whole cache for
# every token.
class GrowingLayer(CacheLayerMixin):
    """Keys and values of one layer in storage [R, heads, capacity, D], of which the first `length` slots are used."""

    # Attributes that the masking code of transformers reads. A sliding window is applied by the mask, so all keys are
    # kept here also for layers that have one.
    is_sliding = False
    is_compileable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage for the first tokens."""
        # key_states: [R, heads, q, D]
        shape = (*key_states.shape[:2], key_states.shape[2] + GROWTH)
        self.keys = key_states.new_empty(*shape, key_states.shape[3])
        self.values = value_states.new_empty(*shape, value_states.shape[3])
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens [R, heads, q, D]; the used part of keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._reserve(key_states.shape[2])
        # Returned are views of the storage, not copies: attention reads the used slots where they lie.
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` for one token a row, [R, heads, D]."""
        if not self.is_initialized:
            return self.update(keys[:, :, None], values[:, :, None])
        start, end = self._reserve(1)
        # `select` and `narrow` in place of indexing: the same views with less work in Python, in the innermost loop of
        # decoding.
        self.keys.select(2, start).copy_(keys)
        self.values.select(2, start).copy_(values)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def _reserve(self, tokens: int) -> tuple[int, int]:
        """The slots of new tokens, first and one past the last, which now count as used."""
        start = self.length
        end = self.length + tokens
        if end > self.keys.shape[2]:
            # `end` tokens and GROWTH spare ones: a prompt may be longer than GROWTH.
            self._resize(rows=self.keys.shape[0], left=0, capacity=end + GROWTH)
        self.length = end
        return start, end

    def _resize(self, rows: int, left: int, capacity: int) -> None:
        """New storage of `rows` rows with the old ones first, moved `left` slots to the right."""
        old = self.keys.shape[0]
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            # Zeros, not empty memory: slots on the left of a row are masked, but masked scores are still multiplied
            # with their values, and NaN x 0 is NaN.
            grown = tensor.new_zeros(rows, tensor.shape[1], capacity, tensor.shape[3])
            grown[:old, :, left : left + self.length] = tensor[:, :, : self.length]
            setattr(self, name, grown)
        self.length += left

    def take(self, other: GrowingLayer) -> None:
        """Add the rows of another layer; the shorter of the two is padded on the left."""
        rows = self.keys.shape[0]
        length = max(self.length, other.length)
        self._resize(rows + other.keys.shape[0], length - self.length, length + GROWTH)
        left = length - other.length
        self.keys[rows:, :, left:length] = other.keys[:, :, : other.length]
        self.values[rows:, :, left:length] = other.values[:, :, : other.length]

    def select(self, rows: torch.Tensor) -> None:
        """Keep `rows`, in this order (repeats allowed)."""
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    # Rows are moved one for one and not gathered by index_select: only the few that fill a gap are copied, and the
    # storage keeps its capacity.
    def drop(self, to: torch.Tensor, source: torch.Tensor, rows: int, trim: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`, without the first `trim` slots."""
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            tensor[to, :, : self.length] = tensor[source, :, : self.length]
            # A view: the memory of dropped rows is given back at the next `_resize`.
            setattr(self, name, tensor[:rows, :, trim:])
        self.length -= trim

    # The methods below are those of transformers' CacheLayerMixin ; `get_max_cache_shape` is its deprecated name for
    # `get_max_length` (5.19). -1 means "no bound" there.
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Used slots."""
        return self.length

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No bound."""
        return -1


class RowCache(Cache):
    """The cache of all layers of a model."""

    layers: list[GrowingLayer]  # type: ignore[assignment]

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[GrowingLayer() for _ in range(layers)])

    @property
    def length(self) -> int:
        """Used slots."""
        return self.layers[0].length


def check_cacheable(config: Any) -> None:
    """ConfigError for a model with layers that keep something other than keys and values (linear attention, say)."""
    # `layer_types` is absent in configurations in which all layers are alike; those are attention.
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise ConfigError(
            f"rollout.engine hf decodes attention layers only, and this model has {', '.join(sorted(others))}: "
            "use an engine that serves it"
        )


# About the square root of a vocabulary of 65,000, at which n / BLOCK sums and BLOCK entries are the least work.
# Measured as part of the decoding step only (docs/performance.md, The embedded engine).
BLOCK = 256
"""Tokens of a vocabulary that are summed before the search: running sums over all of them cost more than the model's
head."""


def uniforms(seed: int, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1), float64, that depend on the seed only."""
    # On the CPU whatever the device: CUDA's generator gives other numbers for the same seed, and what is sampled would
    # depend on where. float64, because float32 has 2^24 values, fewer than a large vocabulary's tail needs.
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


class TokenChooser:
    """Draws the next token of every row by its options.

    `options` is float32 [R, 4]: temperature, top_k, top_p and min_p of each row. What none of the rows asks for is not
    computed.
    """

    def __init__(self, options: np.ndarray, device: torch.device) -> None:
        temperature, top_k, top_p, min_p = options.T
        # Decided on the host once for each change of the rows: a test of device tensors would wait for the device at
        # every token.
        self._greedy = bool((temperature == 0).any())
        self._warm = bool((temperature != 1).any())
        self._truncates = bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
        self._temperature, *self._cuts = torch.from_numpy(options.T.copy()).to(device).unbind()

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [R] and their log-probs float32 [R], from logits [R, V] and uniforms [R]."""
        if not self._truncates and not self._greedy:
            # logits: [R, V], uniform: [R]
            return draw(logits / self._temperature[:, None] if self._warm else logits, None, uniform)
        if self._truncates:
            # As vLLM does, truncation is of the distribution at the temperature.
            # Times `scale` again, because `draw` divides by the temperature: what is dropped is decided at the
            # temperature, the rest is as it was.
            scale = torch.where(self._temperature == 0, 1.0, self._temperature)[:, None]
            logits = truncate(logits / scale, *self._cuts) * scale
        return draw(logits, self._temperature, uniform)


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] with -inf for the tokens that top-k, top-p and min-p (each [R]) leave out; never all of a row.

    top_k 0, top_p 1 and min_p 0 leave a row as it is. min-p keeps tokens at least p times as likely as the likeliest
    (Nguyen et al. 2024); top-p keeps the smallest set of most likely tokens whose probability, among those that min-p
    and top-k left, reaches p (Holtzman et al. 2020). The order is vLLM's.
    """
    # ordered, order, probabilities, keep: [R, V], most likely first; rank: [V]
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    # min_p above 1 would drop all of a row.
    keep[:, 0] = True
    # Renormalised over what min-p and top-k left, then a token stays while the mass before it (cumsum - own) is below
    # p: so the token that crosses p stays, and the first always does.
    remaining = probabilities * keep
    remaining = remaining / remaining.sum(-1, keepdim=True)
    keep &= (remaining.cumsum(-1) - remaining < top_p[:, None]) | (top_p[:, None] >= 1)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(~keep, -torch.inf))


def draw(
    logits: torch.Tensor, temperature: torch.Tensor | None, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R] and their log-probs float32 [R], from logits [R, V], temperatures [R] (None: 1) and uniforms
    [R].

    Temperature 0 takes the likeliest token and gives its log-prob at temperature 1.
    """
    if temperature is None:
        probabilities = logits.softmax(-1)
        tokens = _inverse_cdf(probabilities, uniform)
    else:
        greedy = temperature == 0
        # Greedy rows are computed at temperature 1 to give their log-prob (`Sampling`), and to avoid a division by 0.
        probabilities = (logits / torch.where(greedy, 1.0, temperature)[:, None]).softmax(-1)
        tokens = torch.where(greedy, logits.argmax(-1), _inverse_cdf(probabilities, uniform))
    # log of the probability that was searched, never -inf: `_first_past` does not choose an entry of probability 0.
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()


def _inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token [R] whose cumulative probability passes the uniform number; never one of probability 0."""
    vocabulary = probabilities.shape[-1]
    if vocabulary <= BLOCK:
        return _first_past(probabilities, uniform)[0].squeeze(-1)
    # Two searches in place of one over V: the block in which the cumulative probability passes u, then the token inside
    # it with the rest of u, scaled to [0, 1). Padding has probability 0 and is never chosen.
    padded = torch.nn.functional.pad(probabilities, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else probabilities
    # blocks: [R, V / BLOCK, BLOCK], mass: [R, V / BLOCK]
    blocks = padded.view(len(padded), -1, BLOCK)
    mass = blocks.sum(-1)
    block, wanted, cumulative = _first_past(mass, uniform)
    here = mass.gather(-1, block).double()
    # rest = (u - sum of the blocks before) / (mass of the block), [R]; rounding may put it at 1 or below 0
    rest = ((wanted - (cumulative.gather(-1, block) - here)) / here).clamp_(0.0, _BELOW_ONE).squeeze(-1)
    block = block.squeeze(-1)
    inside = blocks[torch.arange(len(blocks), device=block.device), block]
    return (block * BLOCK + _first_past(inside, rest)[0].squeeze(-1)).clamp_max_(vocabulary - 1)  # the bound is for NaN


def _first_past(mass: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the place at which the running sum of `mass` [R, n] first exceeds `share` [R] of its total, that share of
    it, each [R, 1], and the sum. An entry of mass 0 is never the first: the sum does not grow there."""
    # float64: in float32 the running sum over 150,000 tokens stands still before its end, and tokens of the tail are
    # never drawn.
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may take the product to the total itself: the last entry that has mass is then meant.
    wanted = torch.minimum(share[:, None] * total, total.nextafter(_nothing(total.device)))
    # right=True: the first place whose sum is strictly greater than `wanted`, so that u = 0 skips leading zeros.
    place = torch.searchsorted(cumulative, wanted, right=True).clamp_max_(mass.shape[-1] - 1)  # the bound is for NaN
    return place, wanted, cumulative


@functools.cache
# The direction of `nextafter`, kept because making a tensor on a device costs more than using it.
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


_BELOW_ONE = float(np.nextafter(1.0, 0.0))


@dataclass
class Row:
    """A request that is being decoded."""

    request: Request
    future: asyncio.Future[Completion]
    limit: int
    """Tokens that may be sampled: max_new_tokens, or what the context leaves."""
    start: float


class Rows:
    """R rows. `tokens`, `logprobs` and `versions` [R, N] hold what was sampled, `count` [R] how many of them.

    `last` and `position` [R], on the device, are the newest token, not yet in the cache, and its position; `alive` [R]
    is false for rows that are finished.
    """

    # Arrays [R] or [R, ...] that move with their rows in `keep_alive` and `join`; `last` and `position` do so on the
    # device.
    _ON_HOST = (
        "unused",
        "count",
        "limit",
        "ends",
        "alive",
        "stops",
        "options",
        "uniform",
        "tokens",
        "logprobs",
        "versions",
    )

    def __init__(self, rows: list[Row], cache: RowCache, unused: np.ndarray, position: torch.Tensor) -> None:
        """Rows of which nothing was sampled yet; `unused` int64 [R] are the slots on the left of the cache that a row
        has no token in, `position` is where the next token goes."""
        count = len(rows)
        width = max(row.limit for row in rows)
        options = [row.request.sampling for row in rows]
        self.rows = rows
        self.cache = cache
        self.unused = unused
        self.position = position
        self.last = torch.zeros_like(position)
        self.count = np.zeros(count, dtype=np.int64)
        # count, limit, ends, alive, stops, unused: [R]; options: [R, 4]; uniform, tokens, logprobs, versions: [R, N]
        self.limit = np.asarray([row.limit for row in rows])
        self.ends = np.asarray([not s.ignore_eos for s in options])
        self.alive = np.ones(count, dtype=bool)
        self.stops = np.asarray([bool(s.stop) for s in options])
        self.options = np.asarray([(s.temperature, s.top_k, s.top_p, s.min_p) for s in options], dtype=np.float32)
        # Token n of a row uses number n of its own seed: independent of the batch, of when the row came and of its
        # neighbours (N7). A prefix of a longer series is the same, so `width` does not matter either.
        self.uniform = np.stack([uniforms(row.request.seed, width).numpy() for row in rows])
        self.tokens = np.zeros((count, width), dtype=np.int64)
        self.logprobs = np.zeros((count, width), dtype=np.float32)
        self.versions = np.zeros((count, width), dtype=np.int32)
        self._changed()

    def __len__(self) -> int:
        return len(self.rows)

    def _changed(self) -> None:
        """Recompute the values that depend on the rows."""
        self._every = np.arange(len(self.rows))
        self.choose = TokenChooser(self.options, self.position.device)
        self._unused = torch.from_numpy(self.unused).to(self.position.device)[:, None] if self.unused.any() else None
        self._slots = torch.arange(0, device=self.position.device)

    def seen(self, slots: int) -> torch.Tensor | None:
        """bool [R, slots], true where a row has a token; None where all have one everywhere."""
        if self._unused is None:
            return None
        if len(self._slots) < slots:
            # Doubled, so that it is made a logarithmic number of times in the life of a batch.
            self._slots = torch.arange(2 * slots, device=self._unused.device)
        return self._slots[:slots] >= self._unused

    def sample(self, logits: torch.Tensor, version: int) -> np.ndarray:
        """Draw each row's next token, sampled by the weights `version`; the tokens [R]."""
        place = np.minimum(self.count, self.tokens.shape[1] - 1)  # a dead row writes where nobody reads
        uniform = torch.from_numpy(self.uniform[self._every, place]).to(logits.device)
        self.last, logprobs = self.choose(logits, uniform)
        # The one place of a step that waits for the device: the host has to know which rows have ended.
        tokens = self.last.cpu().numpy()
        self.tokens[self._every, place] = tokens
        self.logprobs[self._every, place] = logprobs.cpu().numpy()
        self.versions[self._every, place] = version
        self.count += 1
        return tokens

    def keep_alive(self) -> None:
        """Drop the dead rows: living ones from the end move into their places, so that few are moved."""
        # Afterwards the first `alive` rows are those that live. `to` are the dead places among these, `source` the
        # living rows behind them: as many of one as of the other.
        alive = int(self.alive.sum())
        to = np.flatnonzero(~self.alive[:alive])
        source = alive + np.flatnonzero(self.alive[alive:])
        for name in self._ON_HOST:
            values = getattr(self, name)
            values[to] = values[source]
            setattr(self, name, values[:alive])
        for place, other in zip(to.tolist(), source.tolist(), strict=True):
            self.rows[place] = self.rows[other]
        del self.rows[alive:]
        index = [torch.from_numpy(places).to(self.last.device) for places in (to, source)]
        for name in ("last", "position"):
            values = getattr(self, name)
            values[index[0]] = values[index[1]]
            setattr(self, name, values[:alive])
        trim = int(self.unused.min())  # slots on the left that no row uses any more
        self.unused = self.unused - trim
        for layer in self.cache.layers:
            layer.drop(index[0], index[1], alive, trim)
        self._changed()

    def join(self, other: Rows) -> None:
        """Add the rows of `other`, as they are: the shorter of the two is moved to the right in its cache."""
        # Both are aligned on the right, so the shorter cache gets |ahead| unused slots on its left.
        ahead = self.cache.length - other.cache.length
        self.unused = self.unused + max(0, -ahead)
        other.unused = other.unused + max(0, ahead)
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.take(theirs)
        for name in self._ON_HOST:
            setattr(self, name, _stacked(getattr(self, name), getattr(other, name)))
        for name in ("last", "position"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        self.rows = self.rows + other.rows
        self._changed()


def _stacked(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One array above the other; the narrower is padded on the right with zeros. `options` are equally wide."""
    if first.ndim == 1 or first.shape[1] == second.shape[1]:
        return np.concatenate([first, second])
    # Zeros behind a row's own `limit` are never read: the row ends there.
    wide = np.zeros((len(first) + len(second), max(first.shape[1], second.shape[1])), dtype=first.dtype)
    wide[: len(first), : first.shape[1]] = first
    wide[len(first) :, : second.shape[1]] = second
    return wide


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows aligned on the right: ids int64 [P, L], and how many slots each leaves unused on the left,
    [P]."""
    length = max(map(len, prompts))
    unused = np.asarray([length - len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), length), dtype=np.int64)
    for i, prompt in enumerate(prompts):
        ids[i, unused[i] :] = prompt
    return ids, unused
