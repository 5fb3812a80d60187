"""The rows of a batch that is being decoded: the draws of their tokens, and what was sampled.

Rows come and go. A finished row stays, dead, until enough of them pay for moving the others. What was sampled is kept
on the host, what the model reads on its device; a step copies from the device once. The caches of keys and values are
for attention layers only (full or sliding window).

In a `SlotCache` a row's token at position p lies in its slot p, so rows of different lengths begin together and end
apart. It is allocated once, for the rows and the length that their requests may reach; rows that arrive are written
into free ones, and rows that end leave theirs free.

Invariant: a row's token depends on its own logits, options and uniform number only, so it does not change with the
batch.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from rlvr.errors import ConfigError
from rlvr.rollout.engine import Completion, Request

# Arbitrary, not measured: fewer slots copy or clear more often, more take memory that may never be used.
GROWTH = 64
"""Slots that are cleared at once, and that are added to a full cache of `rlvr.rollout.aligned_cache`."""
# Requests that arrive one by one would otherwise copy the cache for each: with a quarter more, a row is copied about
# four times in the life of a batch, however many arrive.
SPARE_ROWS = 1 / 4
"""Rows beyond those needed, as a share of them, when a cache gets more rows than it was allocated for."""


# Kernels of attention on a GPU copy a mask whose rows do not begin at multiples of 8 numbers (torch's
# native/transformers/attention.cpp, preprocess_mask).
_ALIGNED = 8


@dataclass(frozen=True)
class CachePlan:
    """Sizes that a cache is allocated for: `rows`, and `slots` of each (prompt and response in tokens)."""

    rows: int
    slots: int


@dataclass(frozen=True)
class LayerShape:
    """Heads of keys (as many are of values) of a layer, and their size."""

    heads: int
    size: int


class SlotCache:
    """Keys and values [2, rows, heads, slots, D] of every layer, of which the first `rows` rows are used.

    Invariant: in used rows, and slots below `cleared`, there are finite numbers. What a row may not see is hidden by an
    additive mask, but a weight of 0 is still multiplied with it, and NaN x 0 is NaN.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], plan: CachePlan, dtype: torch.dtype, device: torch.device, slots: int
    ) -> None:
        """Storage of `slots` slots, to which rows that join it are moved to have the plan's."""
        self.plan = plan
        self.rows = 0
        self.cleared = 0
        self.layers = [
            torch.empty(2, plan.rows, shape.heads, slots, shape.size, dtype=dtype, device=device) for shape in shapes
        ]
        self._every = torch.arange(max(plan.rows, slots + _ALIGNED), device=device)
        self._shown = torch.zeros(slots + _ALIGNED, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.layers[0].shape[3]

    def used(self, number: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, heads, slots, D] of a layer, as views."""
        keys, values = self.layers[number].narrow(1, 0, self.rows).unbind()
        return keys.narrow(2, 0, slots), values.narrow(2, 0, slots)

    def mask(self, positions: torch.Tensor, slots: int, window: int | None) -> torch.Tensor:
        """Numbers to add to the scores [R, 1, 1, slots] of tokens at `positions` [R] that see `window` tokens (None:
        all): 0 or -inf."""
        wide = -(-slots // _ALIGNED) * _ALIGNED
        hidden = self._every[:wide] > positions[:, None]
        if window is not None:
            hidden |= self._every[:wide] <= positions[:, None] - window
        return self._shown[:wide].masked_fill(hidden, -torch.inf)[:, None, None, :slots]

    def clear(self, slots: int) -> None:
        """Put numbers into the slots below `slots`."""
        if slots <= self.cleared:
            return
        # Not the whole storage at once: on a CPU memory that nobody writes is never given by the system.
        end = min(self.slots, slots + GROWTH)
        for layer in self.layers:
            layer[:, :, :, self.cleared : end] = 0
        self.cleared = end

    def write(self, number: int, new: torch.Tensor, positions: torch.Tensor, slot: int | None) -> None:
        """Keys and values [R, 2, heads, D] of each row's token at `positions` [R]; all of them are `slot`, or it is
        None."""
        layer = self.layers[number].narrow(1, 0, len(new))
        if slot is None:
            layer[:, self._every[: len(new)], :, positions] = new
        else:  # one place for all rows is a plain copy, half the time on a CPU
            layer.select(3, slot).copy_(new.transpose(0, 1))

    def place(self, number: int, prompts: torch.Tensor, source: torch.Tensor) -> None:
        """Keys and values [P, 2, heads, L, D] of prompts as those of the first rows: row r gets prompt `source[r]`.

        `placed` has to follow when all layers are there.
        """
        layer = self.layers[number]
        layer[:, : len(source), :, : prompts.shape[3]] = prompts.transpose(0, 1).index_select(1, source)

    def placed(self, rows: int, slots: int) -> None:
        """The first `rows` rows have `slots` slots each, in a cache that was empty."""
        self.rows = rows
        self.cleared = slots

    def join(self, other: SlotCache) -> None:
        """Add the rows of another cache behind those here."""
        first = self.rows
        last = self.rows + other.rows
        self._reserve(last, max(self.slots, other.plan.slots))
        self.clear(other.cleared)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine[:, first:last, :, : other.cleared] = theirs[:, : other.rows, :, : other.cleared]
            mine[:, first:last, :, other.cleared : self.cleared] = 0  # of rows that have ended
        self.rows = last

    def _reserve(self, rows: int, slots: int) -> None:
        """Storage of at least `rows` rows and `slots` slots, larger only where the plan was exceeded.

        There are spare rows, since requests arrive one by one, and no spare slots, which the memory plan would have to
        count for every row: with several turns the cache moves when a turn reaches further than any request before, at
        most once a turn. A move reads and writes the cache once, and the turn's prompt is read anew anyway: with
        Qwen2.5-0.5B in bfloat16 (12,288 bytes a token) 6.4 GB for 64 rows of 4,096 tokens, against 0.2 PFLOP.
        """
        there = self.layers[0].shape[1]
        if rows <= there and slots <= self.slots:
            return
        if rows > there:
            there = rows + int(SPARE_ROWS * rows)
        for number, old in enumerate(self.layers):  # one at a time: at most one layer exists twice
            layer = old.new_empty(2, there, old.shape[2], slots, old.shape[4])
            layer[:, :, :, : self.cleared] = 0
            layer[:, : self.rows, :, : self.cleared] = old[:, : self.rows, :, : self.cleared]
            self.layers[number] = layer
        self._every = torch.arange(max(there, slots + _ALIGNED), device=self._every.device)
        self._shown = self._shown.new_zeros(slots + _ALIGNED)

    def drop(self, to: np.ndarray, source: np.ndarray, rows: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`."""
        if len(to):
            device = self._every.device
            places = torch.from_numpy(to).to(device)
            others = torch.from_numpy(source).to(device)
            for layer in self.layers:
                layer[:, places, :, : self.cleared] = layer[:, others, :, : self.cleared]
        self.rows = rows


class RowsCache(Protocol):
    """Keys and values of the rows of a batch."""

    @property
    def slots(self) -> int:
        """Tokens that a row can have."""

    def join(self, other: Any) -> None:
        """Add the rows of another cache of the same kind behind those here."""

    def drop(self, to: np.ndarray, source: np.ndarray, rows: int) -> None:
        """Keep `rows` rows, after those at `source` were moved to the places `to`."""


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


# Arbitrary: rows change every few steps in a batch of ragged lengths, which drops what was copied ahead.
AHEAD = 16
"""Steps whose uniform numbers are copied to the device at once."""


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
    first_tokens: dict[int, float] = field(default_factory=dict)
    """Alternatives of the first token -> log-prob, where the request asks for them."""


class Rows:
    """R rows. `tokens`, `logprobs` and `versions` [R, N] hold what was sampled, `count` [R] how many of them.

    `last` and `position` [R], on the device, are the newest token, not yet in the cache, and its position; `alive` [R]
    is false for rows that are finished.
    """

    # Arrays [R] or [R, ...] that move with their rows in `keep_alive` and `join`; `last` and `position` do so on the
    # device.
    _ON_HOST = (
        "start",
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

    def __init__(self, rows: list[Row], cache: RowsCache, device: torch.device) -> None:
        """Rows of which nothing was sampled yet; the cache has their prompts."""
        count = len(rows)
        width = max(row.limit for row in rows)
        options = [row.request.sampling for row in rows]
        self.rows = rows
        self.cache = cache
        self.start = np.asarray([len(row.request.token_ids) for row in rows])
        self.position = torch.from_numpy(self.start).to(device)
        self.last = torch.zeros_like(self.position)
        self.count = np.zeros(count, dtype=np.int64)
        # count, limit, ends, alive, stops and start (tokens of the prompt): [R]; options: [R, 4]; uniform, tokens,
        # logprobs, versions: [R, N]
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
        self._ahead: list[torch.Tensor] = []

    @property
    def places(self) -> np.ndarray:
        """The positions of the newest tokens of the rows that are not finished, on the host."""
        places: np.ndarray = (self.start + self.count - 1)[self.alive]
        return places

    def advance(self, last_position: int) -> None:
        """Go to the next position. A finished row that is still in the batch must not run past the cache, or a table of
        learned positions, whose end is `last_position`."""
        self.position = (self.position + 1).clamp_max_(min(last_position, self.cache.slots - 1))

    def sample(self, logits: torch.Tensor, version: int) -> np.ndarray:
        """Draw each row's next token, sampled by the weights `version`; the tokens [R]."""
        place = np.minimum(self.count, self.tokens.shape[1] - 1)  # a dead row writes where nobody reads
        self.last, logprobs = self.choose(logits, self._uniform(logits.device))
        # The one place of a step that waits for the device: the host has to know which rows have ended. One copy for
        # both: as float32, which has every token of a vocabulary below 2^24.
        drawn = torch.cat([self.last, logprobs]).cpu().numpy()
        tokens: np.ndarray = drawn[: len(self)].astype(np.int64)
        self.tokens[self._every, place] = tokens
        self.logprobs[self._every, place] = drawn[len(self) :]
        self.versions[self._every, place] = version
        self.count += 1
        return tokens

    def _uniform(self, device: torch.device) -> torch.Tensor:
        """The uniform numbers of the next token, float64 [R]."""
        if not self._ahead:
            # Several steps' at once, so that most steps copy nothing to the device; dropped when the rows change. A CPU
            # has nothing to copy.
            ahead = 1 if device.type == "cpu" else AHEAD
            steps = self.count + np.arange(ahead)[:, None]
            block = self.uniform[self._every, np.minimum(steps, self.uniform.shape[1] - 1)]
            self._ahead = list(torch.from_numpy(block).to(device).flip(0))
        return self._ahead.pop()

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
        self.cache.drop(to, source, alive)
        self._changed()

    def join(self, other: Rows) -> None:
        """Add the rows of `other`, as they are."""
        self.cache.join(other.cache)
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


def aligned(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows aligned on the left: ids int64 [P, L], and the place of each one's last token, [P]."""
    last = np.asarray([len(prompt) - 1 for prompt in prompts])
    ids = np.zeros((len(prompts), int(last.max()) + 1), dtype=np.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return ids, last
