"""The requests being decoded, one row each: what was sampled is kept on the host, what the model reads on its device.

Rows are aligned on the right, as in the cache. A finished row stays, dead, until enough of them pay for moving the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.rollout.engine import Completion, Request
from rlvr.rollout.kv_cache import RowCache
from rlvr.rollout.sampling import Chooser, uniforms


@dataclass
class Row:
    """A request on its way."""

    request: Request
    future: asyncio.Future[Completion]
    limit: int
    """Tokens that may be sampled: max_new_tokens, or what the context leaves."""
    start: float


class Rows:
    """R rows. `tokens`, `logprobs` and `versions` [R, N] hold what was sampled, `count` [R] how many of them.

    `last` and `position` [R], on the device, are the newest token, not yet in the cache, and its position; `alive` [R] is
    false for rows that are finished.
    """

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
        """Rows of which nothing was sampled yet; `unused` int64 [R] are the slots on the left of the cache that a row has no
        token in, `position` is where the next token goes."""
        count, width = len(rows), max(row.limit for row in rows)
        asked = [row.request.sampling for row in rows]
        self.rows, self.cache, self.unused = rows, cache, unused
        self.position = position
        self.last = torch.zeros_like(position)
        self.count = np.zeros(count, dtype=np.int64)
        self.limit = np.asarray([row.limit for row in rows])
        self.ends = np.asarray([not s.ignore_eos for s in asked])
        self.alive = np.ones(count, dtype=bool)
        self.stops = np.asarray([bool(s.stop) for s in asked])
        self.options = np.asarray([(s.temperature, s.top_k, s.top_p, s.min_p) for s in asked], dtype=np.float32)
        self.uniform = np.stack([uniforms(row.request.seed, width).numpy() for row in rows])
        self.tokens = np.zeros((count, width), dtype=np.int64)
        self.logprobs = np.zeros((count, width), dtype=np.float32)
        self.versions = np.zeros((count, width), dtype=np.int32)
        self._changed()

    def __len__(self) -> int:
        return len(self.rows)

    def _changed(self) -> None:
        """What depends on which rows there are."""
        self._every = np.arange(len(self.rows))
        self.choose = Chooser(self.options, self.position.device)
        self._unused = torch.from_numpy(self.unused).to(self.position.device)[:, None] if self.unused.any() else None
        self._slots = torch.arange(0, device=self.position.device)

    def seen(self, slots: int) -> torch.Tensor | None:
        """bool [R, slots], true where a row has a token; None where all have one everywhere."""
        if self._unused is None:
            return None
        if len(self._slots) < slots:
            self._slots = torch.arange(2 * slots, device=self._unused.device)
        return self._slots[:slots] >= self._unused

    def sample(self, logits: torch.Tensor, version: int) -> np.ndarray:
        """Draw each row's next token, sampled by the weights `version`; the tokens [R]."""
        place = np.minimum(self.count, self.tokens.shape[1] - 1)  # a dead row writes where nobody reads
        uniform = torch.from_numpy(self.uniform[self._every, place]).to(logits.device)
        self.last, logprobs = self.choose(logits, uniform)
        tokens = self.last.cpu().numpy()
        self.tokens[self._every, place] = tokens
        self.logprobs[self._every, place] = logprobs.cpu().numpy()
        self.versions[self._every, place] = version
        self.count += 1
        return tokens

    def keep_alive(self) -> None:
        """Drop the dead rows: living ones from the end move into their places, so that few are moved."""
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
        self.cache.drop(index[0], index[1], alive, trim)
        self._changed()

    def join(self, other: Rows) -> None:
        """Add the rows of `other`, as they are: the shorter of the two is moved to the right in its cache."""
        ahead = self.cache.length - other.cache.length
        self.unused, other.unused = self.unused + max(0, -ahead), other.unused + max(0, ahead)
        self.cache.take(other.cache)
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
    wide = np.zeros((len(first) + len(second), max(first.shape[1], second.shape[1])), dtype=first.dtype)
    wide[: len(first), : first.shape[1]] = first
    wide[len(first) :, : second.shape[1]] = second
    return wide


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows aligned on the right: ids int64 [P, L], and how many slots each leaves unused on the left, [P]."""
    length = max(map(len, prompts))
    unused = np.asarray([length - len(prompt) for prompt in prompts])
    ids = np.zeros((len(prompts), length), dtype=np.int64)
    for i, prompt in enumerate(prompts):
        ids[i, unused[i] :] = prompt
    return ids, unused
