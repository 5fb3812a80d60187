"""The embedded engine: batched decoding of many groups with the model in this process.

A prompt is prefilled once for all its requests, finished rows are dropped from the batch, and waiting requests are
admitted between steps. It runs on the event loop of its caller and gives way to it after every step, so that
verification overlaps sampling.

Invariants: a request's tokens depend on its prompt, options, seed and the weights only (N7); weights are taken between
two steps, never within one, and every token keeps the version that sampled it.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from rlvr.core.waits import Wait
from rlvr.errors import DataError
from rlvr.policy import Policy
from rlvr.policy.adapters import is_adapter
from rlvr.policy.quantization import dense_model, has_quantized
from rlvr.records import StopReason
from rlvr.registry import register
from rlvr.rollout.aligned_cache import RowCache, read_by_modules
from rlvr.rollout.decoder import Steps
from rlvr.rollout.decoder_parts import UnfitError
from rlvr.rollout.decoder_trial import proven
from rlvr.rollout.engine import Bucket, Completion, EngineFactory, InFlight, Request
from rlvr.rollout.rows import CachePlan, Row, Rows, RowsCache, SlotCache, aligned, check_cacheable

log = logging.getLogger(__name__)

# Arbitrary, not measured: smaller copies more often, larger decodes more finished rows (at most this share of a
# step).
COMPACT_AT = 1 / 16
"""Finished rows are dropped when they are at least this share of the batch: dropping copies the cache."""
# As long as torch's collectives wait for a rank (distributed/world.py, GIVEN_UP): the other ranks wait at the next
# barrier meanwhile.
PUBLISH_SECONDS = 1800.0
"""Seconds within which responses under way must finish on the old weights."""


@register("engine", "hf")
@dataclass(frozen=True)
class HFEngineOptions(EngineFactory):
    """Options of the embedded engine."""

    max_rows: int = 1024
    """Most rows decoded at once."""
    prefill_tokens: int = 16384
    """Most prompt tokens (padded) in one prefill."""
    copy_weights: bool = False
    """Keep a copy of the weights and take new ones by `publish`, instead of sharing the trainer's. Always so where
    `rollout.staleness` has it sample while the trainer updates."""

    def for_run(self, longest: int | None, partitions: bool, heartbeat_timeout: float | None) -> Self:
        """A copy of the weights where a rank does not have them all."""
        return dataclasses.replace(self, copy_weights=self.copy_weights or partitions)

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> HFEngine:
        """The engine for `policy`; `in_flight` says what becomes of open requests when weights are published."""
        engine = HFEngine(policy, self, in_flight)
        engine.prepare()
        return engine


class HFEngine:
    """Samples with a Hugging Face model in this process. Not for two event loops at once."""

    def __init__(
        self, policy: Policy, options: HFEngineOptions | None = None, in_flight: InFlight | None = None
    ) -> None:
        self.options = options or HFEngineOptions()
        # With `in_flight` the engine samples while the optimizer writes the trainer's tensors, so it must have its own.
        self.shares_weights = not self.options.copy_weights and in_flight is None
        self.policy = policy if self.shares_weights else _own_copy(policy)
        self.context = policy.context
        self.version = 0
        self._in_flight = in_flight
        # A threading lock, not an asyncio one: steps run on the collector's loop, `publish` on the trainer's thread.
        self._stepping = threading.Lock()
        """Held during a step, and while weights are copied."""
        self._publishing = False
        config = self.policy.causal_lm.config.get_text_config()
        check_cacheable(config)
        vocabulary = self.policy.causal_lm.get_input_embeddings().weight.shape[0]
        # bool [V], V of the embedding: a lookup for R tokens in place of R tests
        self._is_end = np.isin(np.arange(vocabulary), sorted(self.policy.end_ids))
        self._decoder = Decoder(self.policy)
        self._last_position = self.context - 1
        self._given_up = False
        """True if a request of the batch was cancelled since the last step."""
        self._waiting: collections.deque[Row] = collections.deque()
        self._active: Rows | None = None
        self._driver: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Try how the model is decoded, at the start and not in the first step."""
        with torch.inference_mode(), self.policy.evaluating():
            self._decoder.try_steps()

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. DataError when the prompt is empty or fills the context."""
        if request.constraint:
            raise DataError("rollout.engine hf takes no constraint: use rollout.engine vllm, or leave it out")
        available = self.context - len(request.token_ids)
        if not request.token_ids or available < 1:
            raise DataError(
                f"a prompt of {len(request.token_ids)} tokens cannot be continued: the model's context is "
                f"{self.context} tokens"
            )
        loop = asyncio.get_running_loop()
        row = Row(request, loop.create_future(), min(request.sampling.max_new_tokens, available), time.perf_counter())
        # Only queued: rows that come in one pass of the loop are prefilled together by the driver.
        self._waiting.append(row)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        try:
            return await row.future
        except asyncio.CancelledError:
            # Rows are dropped at the next step; the flag saves looking at R futures in every step.
            self._given_up = True
            if self._active is not None and all(row.future.done() for row in self._active.rows):
                self._active = None  # at once, so that no row is decoded without a request
            raise

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> None:
        """Take version `version` of the weights; with shared weights they are there already.

        WaitTimeoutError when the responses that are to finish on the old weights do not within `PUBLISH_SECONDS`.
        """
        if self.shares_weights:
            self.version = version
            # The decoder may hold copies of weights (joined products, casts): they are made again at the next step.
            self._decoder.stale = True
            return
        self._publishing = True
        try:
            with Wait("responses to finish on the old weights", time.monotonic() + PUBLISH_SECONDS) as waiting:
                # Polled with the lock released in between, so that the driver goes on with the steps that responses
                # need to finish. 0.5 ms is short beside a decoding step.
                while not self._take(version, weights):
                    waiting.check()
                    time.sleep(0.0005)
        finally:
            # In a `finally`: a publish that timed out must let requests in again.
            self._publishing = False

    def _take(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> bool:
        """Copy the weights between two steps; False where responses must finish first."""
        with self._stepping, torch.no_grad():
            # `_publishing` keeps new rows out meanwhile, so the batch runs empty.
            if self._in_flight == "finish" and self._active is not None:
                return False
            # A tied LM head comes under its own name too, and its tensor is then written twice.
            mine = dict(self.policy.causal_lm.named_parameters(remove_duplicate=False))
            for bucket in weights():
                for name, tensor in bucket:
                    mine[name].copy_(tensor)
            self.version = version
            self._decoder.stale = True
            return True

    def release(self) -> None:
        """Drop the copies of weights that the decoder holds, where no request is open."""
        with self._stepping:
            if self._active is None and not self._waiting:
                self._decoder.release()

    def mismatched_weights(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
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
            # Plans start their members one after the other: passes of the loop go on until none has added a request.
            while seen != len(self._waiting):  # requests made together are prefilled together
                seen = len(self._waiting)
                await asyncio.sleep(0)
            # With "continue" no step may hold the lock again before the publish takes it: a threading lock is not fair,
            # and the loop could take it for ever. With "finish" steps go on until the batch is empty.
            if self._publishing and (self._in_flight == "continue" or self._active is None):
                await asyncio.sleep(0.0005)  # the weights are about to change
                continue
            try:
                # `evaluating` turns dropout off: sampling and the trainer's log-probs must be of the same distribution.
                with self._stepping, torch.inference_mode(), self.policy.evaluating():
                    self._step()
            # Broad: whatever a step raises (out of memory, say), coroutines that wait for its rows would otherwise wait
            # for ever.
            except Exception as error:  # a failed step fails the requests that were in it, each with the reason
                rows = [*self._waiting, *(self._active.rows if self._active else ())]
                self.close()
                for row in rows:
                    if not row.future.done():
                        row.future.set_exception(error)

    def _step(self) -> None:
        """Admit waiting requests while there are free rows; otherwise sample one token for every row."""
        self._waiting = collections.deque(row for row in self._waiting if not row.future.done())  # given up meanwhile
        free_rows = self.options.max_rows - (len(self._active.rows) if self._active else 0)
        # A pass either admits or decodes: the loop gets its turn after a long prefill as after a step.
        if self._waiting and free_rows > 0 and not self._publishing:
            arrivals = [self._waiting.popleft() for _ in range(min(free_rows, len(self._waiting)))]
            try:
                self._admit(arrivals)
            except Exception:
                self._waiting.extendleft(arrivals)  # so that their requests fail with the error as well
                raise
            return
        rows = self._active
        if rows is None:
            return
        logits = self._decoder.next_logits(rows.last, rows.position, rows.places, rows.cache)
        rows.advance(self._last_position)
        self._active = self._sampled(rows, logits)

    def _admit(self, arrivals: list[Row]) -> None:
        """Prefill the arrivals' distinct prompts, sample their first tokens and add them to the batch."""
        by_prompt: dict[tuple[int, ...], list[Row]] = {}
        for row in arrivals:
            by_prompt.setdefault(row.request.token_ids, []).append(row)
        # Prefills take prompts of similar length, longest first, so that padding is little: `fit` prompts of the
        # longest's length are at most `prefill_tokens`.
        prompts = sorted(by_prompt, key=len)
        plan = CachePlan(len(arrivals), max(len(row.request.token_ids) + row.limit for row in arrivals))
        while prompts:
            fit = max(1, self.options.prefill_tokens // len(prompts[-1]))
            now = prompts[-fit:]
            prompts = prompts[:-fit]
            rows, logits = self._prefill({prompt: by_prompt[prompt] for prompt in now}, plan)
            for row, of_row in zip(rows.rows, logits, strict=True):
                if row.request.alternatives:
                    row.first_tokens = _likeliest(of_row, row.request)
            arrived = self._sampled(rows, logits)
            if arrived is not None and self._active is not None:
                self._active.join(arrived)
            elif arrived is not None:
                self._active = arrived

    def _prefill(self, by_prompt: dict[tuple[int, ...], list[Row]], plan: CachePlan) -> tuple[Rows, torch.Tensor]:
        """Rows for all requests of these prompts, and the logits of their first tokens; each prompt is computed
        once."""
        rows = [row for group in by_prompt.values() for row in group]
        # [R]: the prompt of each row. The cache and the logits of a prompt are repeated for each of its rows.
        source = np.repeat(np.arange(len(by_prompt)), [len(group) for group in by_prompt.values()])
        logits, cache = self._decoder.read(list(by_prompt), source, plan, joins=self._active is not None)
        if len(source) > len(by_prompt):
            logits = logits.index_select(0, torch.from_numpy(source).to(logits.device))
        return Rows(rows, cache, logits.device), logits

    def _sampled(self, rows: Rows, logits: torch.Tensor) -> Rows | None:
        """Draw each row's next token and settle the requests that end with it; the rows that go on, None when none
        does."""
        # Read before the stop tests, under the lock: the version is that of the weights that made these logits.
        tokens = rows.sample(logits, self.version)
        ended = self._is_end[tokens] & rows.ends
        finished = rows.alive & (ended | (rows.count >= rows.limit))
        for i in np.flatnonzero(rows.stops & rows.alive).tolist():
            # An end token is stronger than a stop string that ends with it; a stop string is stronger than the length.
            if not ended[i] and self._at_stop_string(rows, i):
                finished[i] = False
                self._settle(rows, i, StopReason.STOP_STRING)
        for i in np.flatnonzero(finished).tolist():
            row = rows.rows[i]
            # `limit` is the smaller of max_new_tokens and what the context leaves: which of them it was says the stop
            # reason.
            whole = row.limit == row.request.sampling.max_new_tokens
            self._settle(rows, i, StopReason.END if ended[i] else StopReason.LENGTH if whole else StopReason.CONTEXT)
        if self._given_up:
            self._given_up = False
            rows.alive &= [not row.future.cancelled() for row in rows.rows]
        dead = len(rows) - int(rows.alive.sum())
        if dead == len(rows):
            return None
        # Dead rows are decoded on until it pays to move the others into their places.
        if dead >= max(1, COMPACT_AT * len(rows)):
            rows.keep_alive()
        return rows

    def _at_stop_string(self, rows: Rows, i: int) -> bool:
        """Return True if row i's text ends inside or with one of its stop strings that the newest token completed."""
        stop = rows.rows[i].request.sampling.stop
        count = int(rows.count[i])
        longest = max(len(s.encode()) for s in stop)
        # A token is at least one byte; a few tokens more than the string has bytes, for characters cut by the window.
        tail = self.policy.tokenizer.decode(rows.tokens[i, max(0, count - longest - 8) : count].tolist())
        return any(s in tail for s in stop)

    def _settle(self, rows: Rows, i: int, reason: StopReason) -> None:
        row = rows.rows[i]
        count = int(rows.count[i])
        # Copies: a view would keep the arrays of the whole batch for as long as the rollout lives.
        ids = rows.tokens[i, :count].copy()
        rows.alive[i] = False
        if row.future.done():  # its request was cancelled
            return
        row.future.set_result(
            Completion(
                token_ids=ids,
                logprobs=rows.logprobs[i, :count].copy(),
                versions=rows.versions[i, :count].copy(),
                stop=reason,
                text=str(self.policy.tokenizer.decode(ids.tolist(), skip_special_tokens=True)),
                seconds=time.perf_counter() - row.start,
                first_tokens=row.first_tokens,
            )
        )


class Decoder:
    """Next-token logits of `policy`, and the keys and values of its rows."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.steps: Steps | None = None
        """The short way, once it was tried and found equal."""
        self.stale = True
        """True if the weights have changed since they were taken."""
        self._tried = False

    def try_steps(self) -> None:
        """Find out whether the short way gives what the model gives; once."""
        if self._tried:
            return
        self._tried = True
        try:
            self.steps = proven(self.policy)
        except UnfitError as reason:
            kind = type(self.policy.causal_lm).__name__
            log.info("rollout.engine hf: %s is decoded by its own modules: %s", kind, reason)

    def read(
        self, prompts: Sequence[Sequence[int]], source: np.ndarray, plan: CachePlan, joins: bool
    ) -> tuple[torch.Tensor, RowsCache]:
        """Float32 logits [P, V] after P prompts, and a cache in which row r is prompt `source[r]`.

        `plan` is what the batch may need. `joins`: the rows are to be added to others, which are in progress.
        """
        self.try_steps()
        # A batch begins: nothing says that the weights are those of the last one.
        self.stale |= not joins
        if self.steps is None:
            return read_by_modules(self.policy, prompts, source, plan)
        self._refresh(self.steps)
        ids, last = aligned(prompts)
        if joins:  # rows that are copied to those in progress
            cache = self.steps.cache(CachePlan(len(source), plan.slots), ids.shape[1])
        else:
            cache = self.steps.cache(plan, plan.slots)
        device = self.policy.device
        inputs = (torch.from_numpy(values).to(device) for values in (ids, last, source))
        return self.steps.read(cache, *inputs), cache

    def next_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, places: np.ndarray, cache: RowsCache
    ) -> torch.Tensor:
        """Float32 logits [R, V] after tokens [R] at `positions` [R]; their keys and values are added to the cache.

        `places` are the positions of the rows that are not finished, on the host.
        """
        if isinstance(cache, RowCache):
            # Some models warn where they are given no mask.
            seen = cache.seen(cache.length + 1, ids.device)
            return self.policy.next_logits(ids[:, None], seen, positions[:, None], cache)
        assert self.steps is not None and isinstance(cache, SlotCache)
        self._refresh(self.steps)
        largest = int(places.max())
        slot = largest if largest == int(places.min()) else None
        return self.steps.next_logits(ids, positions, largest + 1, slot, cache)

    def release(self) -> None:
        """Hold no copies of weights until the next prompt or step."""
        self.stale = True
        if self.steps is not None:
            self.steps.release()

    def _refresh(self, steps: Steps) -> None:
        if self.stale:
            self.stale = False
            steps.refresh()


def _likeliest(logits: torch.Tensor, request: Request) -> dict[int, float]:
    """The likeliest tokens of a row's logits [V] -> log-prob, as many as the request asks for."""
    log_probs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    values, ids = log_probs.topk(min(request.alternatives, len(log_probs)))
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def _own_copy(policy: Policy) -> Policy:
    """A policy with weights of its own, the adapter merged, for sampling only."""
    # The adapter is merged because `publish` gets merged weights under the names of the plain model.
    model = copy.deepcopy(policy.model)
    if has_quantized(model):
        model = dense_model(model.unload())  # the adapter comes with the first publish
    elif is_adapter(model):
        model = model.merge_and_unload()
    return Policy(model.to(policy.home).requires_grad_(False).eval(), policy.tokenizer, policy.dtype)
