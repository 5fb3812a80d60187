"""The embedded engine: batched decoding of many groups with the model in this process.

A prompt is prefilled once for all its requests, finished rows are dropped from the batch, and waiting requests are
admitted between steps. It runs on the event loop of whoever calls it and gives way to it after every step, so that
verification overlaps sampling.

Invariants: a request's tokens depend on its prompt, options, seed and the weights only (N7); weights are taken between two
steps, never within one, and every token keeps the version that sampled it.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.errors import DataError, WaitTimeout
from rlvr.policy import Policy
from rlvr.policy.adapters import is_adapter
from rlvr.records import StopReason
from rlvr.registry import register
from rlvr.rollout.engine import Bucket, Completion, InFlight, Request
from rlvr.rollout.kv_cache import RowCache, check_cacheable
from rlvr.rollout.sampling import draw, truncate, uniforms

COMPACT_AT = 1 / 16
"""Finished rows are dropped when they are at least this share of the batch: dropping copies the cache."""
PUBLISH_SECONDS = 1800.0
"""How long responses under way may take to finish on the old weights."""


@register("engine", "hf")
@dataclass(frozen=True)
class HFEngineOptions:
    """Options of the embedded engine."""

    max_rows: int = 1024
    """Most rows decoded at once."""
    prefill_tokens: int = 16384
    """Most prompt tokens (padded) in one prefill."""
    copy_weights: bool = False
    """Keep a copy of the weights and take new ones by `publish`, instead of sharing the trainer's. Always so where
    `rollout.staleness` has it sample while the trainer updates."""

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> HFEngine:
        """The engine for `policy`; `in_flight` says what becomes of open requests when weights are published."""
        return HFEngine(policy, self, in_flight)


@dataclass
class _Row:
    """A request on its way."""

    request: Request
    future: asyncio.Future[Completion]
    limit: int
    """Tokens that may be sampled: max_new_tokens, or what the context leaves."""
    start: float


@dataclass
class _Rows:
    """The rows being decoded; tensors have one row each and live on the model's device."""

    rows: list[_Row]
    cache: RowCache
    mask: torch.Tensor
    """int64 [R, slots], 1 where the cache holds a token of the row"""
    position: torch.Tensor
    """int64 [R], the position of the next token"""
    last: torch.Tensor
    """int64 [R], the newest token, not yet in the cache"""
    uniform: torch.Tensor
    """float64 [R, N]"""
    tokens: torch.Tensor
    """int64 [R, N], sampled so far"""
    logprobs: torch.Tensor
    """float32 [R, N]"""
    versions: torch.Tensor
    """int32 [R, N], the weights that sampled each token"""
    count: torch.Tensor
    """int64 [R], how many were sampled"""
    limit: torch.Tensor
    """int64 [R]"""
    options: torch.Tensor
    """float32 [R, 4]: temperature, top_k, top_p, min_p"""
    ends: torch.Tensor
    """bool [R]: whether an end token ends the row"""
    alive: torch.Tensor
    """bool [R]"""

    PER_ROW = (
        "mask",
        "position",
        "last",
        "uniform",
        "tokens",
        "logprobs",
        "versions",
        "count",
        "limit",
        "options",
        "ends",
        "alive",
    )


class HFEngine:
    """Samples with a Hugging Face model in this process. Not for two event loops at once."""

    def __init__(
        self, policy: Policy, options: HFEngineOptions | None = None, in_flight: InFlight | None = None
    ) -> None:
        self.options = options or HFEngineOptions()
        self.shares_weights = not self.options.copy_weights and in_flight is None
        self.policy = policy if self.shares_weights else _own_copy(policy)
        self.version = 0
        self._in_flight = in_flight
        self._stepping = threading.Lock()
        """Held during a step, and while weights are copied."""
        self._publishing = False
        config = self.policy.causal_lm.config.get_text_config()
        check_cacheable(config)
        self._layers = int(config.num_hidden_layers)
        self._end_ids = torch.tensor(sorted(self.policy.end_ids), dtype=torch.long, device=self.policy.device)
        self._waiting: collections.deque[_Row] = collections.deque()
        self._active: _Rows | None = None
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. DataError when the prompt is empty or leaves no room in the context."""
        if request.model != "policy" or request.attachments or request.constraint:
            raise DataError(
                "rollout.engine hf samples text from the policy only: it has no other model, takes no attachments and no constraint"
            )
        room = self.policy.context - len(request.token_ids)
        if not request.token_ids or room < 1:
            raise DataError(
                f"a prompt of {len(request.token_ids)} tokens cannot be continued: the model's context is {self.policy.context} tokens"
            )
        loop = asyncio.get_running_loop()
        row = _Row(request, loop.create_future(), min(request.sampling.max_new_tokens, room), time.perf_counter())
        self._waiting.append(row)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return await row.future
        except asyncio.CancelledError:
            if self._active is not None and all(row.future.done() for row in self._active.rows):
                self._active = None  # at once, so that nothing is decoded for nobody
            raise

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> None:
        """Take version `version` of the weights; with shared weights they are there already.

        WaitTimeout when the responses that are to finish on the old weights do not within `PUBLISH_SECONDS`.
        """
        if self.shares_weights:
            self.version = version
            return
        deadline, self._publishing = time.monotonic() + PUBLISH_SECONDS, True
        try:
            while not self._take(version, weights):
                if time.monotonic() > deadline:
                    raise WaitTimeout(f"waited {PUBLISH_SECONDS:g} s for responses to finish on the old weights")
                time.sleep(0.0005)
        finally:
            self._publishing = False

    def _take(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> bool:
        """Copy the weights between two steps; False where responses must finish first."""
        with self._stepping, torch.no_grad():
            if self._in_flight == "finish" and self._active is not None:
                return False
            mine = dict(self.policy.causal_lm.named_parameters(remove_duplicate=False))
            for bucket in weights():
                for name, tensor in bucket:
                    mine[name].copy_(tensor)
            self.version = version
            return True

    def release(self) -> None:
        """Nothing is held that the trainer needs."""

    def differing(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
        """Names of the tensors of a copy that are not those of `weights`."""
        mine = dict(self.policy.causal_lm.named_parameters(remove_duplicate=False))
        return [
            name
            for bucket in weights()
            for name, tensor in bucket
            if not torch.equal(mine[name], tensor.to(mine[name].dtype))
        ]

    def close(self) -> None:
        """Drop what is being decoded."""
        self._waiting.clear()
        self._active = None

    async def _drive(self) -> None:
        """Decode until nothing is left, giving way to the loop after every step."""
        while self._waiting or self._active is not None:
            seen = -1
            while seen != len(self._waiting):  # requests made together are prefilled together
                seen = len(self._waiting)
                await asyncio.sleep(0)
            if self._publishing and (self._in_flight == "continue" or self._active is None):
                await asyncio.sleep(0.0005)  # the weights are about to change
                continue
            try:
                with self._stepping, torch.inference_mode(), self.policy.evaluating():
                    self._step()
            except Exception as error:  # a failed step fails the requests that were in it, each with the reason
                rows = [*self._waiting, *(self._active.rows if self._active else ())]
                self.close()
                for row in rows:
                    if not row.future.done():
                        row.future.set_exception(error)

    def _step(self) -> None:
        """Admit what waits, as far as there is room, and sample one token for every row."""
        self._waiting = collections.deque(row for row in self._waiting if not row.future.done())  # given up meanwhile
        room = self.options.max_rows - (len(self._active.rows) if self._active else 0)
        if self._waiting and room > 0 and not self._publishing:
            arrivals = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
            try:
                self._admit(arrivals)
            except Exception:
                self._waiting.extendleft(arrivals)  # so that they learn of it too
                raise
            return
        rows = self._active
        if rows is None:
            return
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(len(rows.rows), 1)], dim=1)
        logits = self.policy.next_logits(rows.last[:, None], rows.mask, rows.position[:, None], rows.cache)
        # A finished row that is still in the batch must not run past a table of learned positions.
        rows.position = (rows.position + 1).clamp_max(self.policy.context - 1)
        self._sample(rows, logits)
        self._active = self._without_finished(rows)

    def _admit(self, arrivals: list[_Row]) -> None:
        """Prefill the arrivals' distinct prompts, sample their first tokens and add them to the batch."""
        by_prompt: dict[tuple[int, ...], list[_Row]] = {}
        for row in arrivals:
            by_prompt.setdefault(row.request.token_ids, []).append(row)
        prompts = sorted(by_prompt, key=len)
        while prompts:
            fit = max(1, self.options.prefill_tokens // len(prompts[-1]))
            now, prompts = prompts[-fit:], prompts[:-fit]
            rows, logits = self._prefill({prompt: by_prompt[prompt] for prompt in now})
            self._sample(rows, logits)
            arrived = self._without_finished(rows)
            if arrived is not None:
                self._active = arrived if self._active is None else _joined(self._active, arrived)

    def _prefill(self, by_prompt: dict[tuple[int, ...], list[_Row]]) -> tuple[_Rows, torch.Tensor]:
        """Rows for all requests of these prompts, and the logits of their first tokens; each prompt is computed once."""
        device, length = self.policy.device, max(map(len, by_prompt))
        ids = np.zeros((len(by_prompt), length), dtype=np.int64)
        mask = np.zeros_like(ids)
        for i, prompt in enumerate(by_prompt):
            ids[i, length - len(prompt) :], mask[i, length - len(prompt) :] = prompt, 1
        masks = torch.from_numpy(mask).to(device)
        cache = RowCache(self._layers)
        positions = (masks.cumsum(-1) - 1).clamp_min(0)
        logits = self.policy.next_logits(torch.from_numpy(ids).to(device), masks, positions, cache)

        rows = [row for group in by_prompt.values() for row in group]
        source = torch.tensor([i for i, group in enumerate(by_prompt.values()) for _ in group], device=device)
        cache.select(source)
        width = max(row.limit for row in rows)
        uniform = torch.stack([uniforms(row.request.seed, width, device) for row in rows])
        options = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in (row.request.sampling for row in rows)]
        fresh = _Rows(
            rows=rows,
            cache=cache,
            mask=masks[source],
            position=masks.sum(-1)[source],
            last=torch.zeros(len(rows), dtype=torch.long, device=device),
            uniform=uniform,
            tokens=torch.zeros(len(rows), width, dtype=torch.long, device=device),
            logprobs=torch.zeros(len(rows), width, device=device),
            versions=torch.zeros(len(rows), width, dtype=torch.int32, device=device),
            count=torch.zeros(len(rows), dtype=torch.long, device=device),
            limit=torch.tensor([row.limit for row in rows], device=device),
            options=torch.tensor(options, dtype=torch.float32, device=device),
            ends=torch.tensor([not row.request.sampling.ignore_eos for row in rows], device=device),
            alive=torch.ones(len(rows), dtype=torch.bool, device=device),
        )
        return fresh, logits[source]

    def _sample(self, rows: _Rows, logits: torch.Tensor) -> None:
        """Draw each row's next token and settle the requests that end with it."""
        temperature, top_k, top_p, min_p = rows.options.unbind(-1)
        if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
            # As vLLM does, truncation is of the distribution at the temperature.
            scale = torch.where(temperature == 0, 1.0, temperature)[:, None]
            logits = truncate(logits / scale, top_k, top_p, min_p) * scale
        every = torch.arange(len(rows.rows), device=logits.device)
        place = rows.count.clamp_max(rows.tokens.shape[1] - 1)
        tokens, logprobs = draw(logits, temperature, rows.uniform[every, place])
        rows.tokens[every, place], rows.logprobs[every, place] = tokens, logprobs
        rows.versions[every, place] = self.version
        rows.count = rows.count + 1
        rows.last = tokens
        ended = torch.isin(tokens, self._end_ids) & rows.ends
        finished = rows.alive & (ended | (rows.count >= rows.limit))
        for i, row in enumerate(rows.rows):
            if row.request.sampling.stop and rows.alive[i] and not finished[i] and self._at_stop_string(rows, i):
                self._settle(rows, i, StopReason.STOP_STRING)
        if not bool(finished.any()):
            return
        for i in torch.nonzero(finished).flatten().tolist():
            row = rows.rows[i]
            if bool(ended[i]):
                reason = StopReason.END
            else:
                reason = StopReason.LENGTH if row.limit == row.request.sampling.max_new_tokens else StopReason.CONTEXT
                if row.request.sampling.stop and self._at_stop_string(rows, i):
                    reason = StopReason.STOP_STRING
            self._settle(rows, i, reason)

    def _at_stop_string(self, rows: _Rows, i: int) -> bool:
        """Whether row i's text ends inside or with one of its stop strings that the newest token completed."""
        stop, count = rows.rows[i].request.sampling.stop, int(rows.count[i])
        longest = max(len(s.encode()) for s in stop)
        # A token is at least one byte; a few tokens more than the string has bytes, for characters cut by the window.
        tail = self.policy.tokenizer.decode(rows.tokens[i, max(0, count - longest - 8) : count].tolist())
        return any(s in tail for s in stop)

    def _settle(self, rows: _Rows, i: int, reason: StopReason) -> None:
        row, count = rows.rows[i], int(rows.count[i])
        ids = rows.tokens[i, :count].cpu().numpy().copy()
        rows.alive[i] = False
        if row.future.done():  # given up by whoever asked
            return
        row.future.set_result(
            Completion(
                token_ids=ids,
                logprobs=rows.logprobs[i, :count].cpu().numpy().copy(),
                versions=rows.versions[i, :count].cpu().numpy().copy(),
                stop=reason,
                text=str(self.policy.tokenizer.decode(ids.tolist(), skip_special_tokens=True)),
                seconds=time.perf_counter() - row.start,
            )
        )

    def _without_finished(self, rows: _Rows) -> _Rows | None:
        """The rows without finished ones when there are enough of them to pay for the copy; None when all are finished."""
        for i, row in enumerate(rows.rows):
            if row.future.cancelled():
                rows.alive[i] = False
        alive = int(rows.alive.sum())
        if alive == 0:
            return None
        if len(rows.rows) - alive < max(1, COMPACT_AT * len(rows.rows)):
            return rows
        keep = torch.nonzero(rows.alive).flatten()
        for name in _Rows.PER_ROW:
            setattr(rows, name, getattr(rows, name)[keep])
        trim = int(rows.mask.argmax(dim=1).min())  # slots on the left that no row uses any more
        rows.mask = rows.mask[:, trim:]
        rows.cache.select(keep, trim)
        rows.rows = [rows.rows[i] for i in keep.tolist()]
        return rows


def _joined(first: _Rows, second: _Rows) -> _Rows:
    """Both sets of rows as one; masks are padded on the left, buffers on the right."""
    slots = max(first.mask.shape[1], second.mask.shape[1])
    for rows in (first, second):
        rows.mask = torch.nn.functional.pad(rows.mask, (slots - rows.mask.shape[1], 0))
    first.cache.take(second.cache)
    for name in _Rows.PER_ROW:
        mine, theirs = getattr(first, name), getattr(second, name)
        if mine.ndim == 2:
            width = max(mine.shape[1], theirs.shape[1])
            mine = torch.nn.functional.pad(mine, (0, width - mine.shape[1]))
            theirs = torch.nn.functional.pad(theirs, (0, width - theirs.shape[1]))
        setattr(first, name, torch.cat([mine, theirs]))
    first.rows = first.rows + second.rows
    return first


def _own_copy(policy: Policy) -> Policy:
    """A policy with weights of its own, the adapter merged, for sampling only."""
    model = copy.deepcopy(policy.model)
    if is_adapter(model):
        model = model.merge_and_unload()
    return Policy(model.requires_grad_(False).eval(), policy.tokenizer, policy.dtype)
