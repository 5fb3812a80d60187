"""The engines of all ranks as one: rank 0 draws and requests, every rank samples with the engine beside its policy.

Requests go to the other ranks over sockets, so that sampling needs no collective call and any plan, dynamic sampling or
staleness works as with one process. Invariants: requests with one prompt go to one rank while any of them is open, so
that the prompt is computed once; what is sampled depends on the request's seed and not on the rank (N7); a rank that is
gone fails the requests that it had, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

import numpy as np

from rlvr import registry
from rlvr.core.process.channel import Channel
from rlvr.core.process.pending_replies import Replies
from rlvr.core.process.tracing import RemoteFailure
from rlvr.core.specs import ComponentSpec, SpecLike
from rlvr.core.startup_lines import startup
from rlvr.core.waits import Wait
from rlvr.distributed.world import World, machine
from rlvr.errors import LostRankError, RlvrError, TrainingError
from rlvr.policy import Policy
from rlvr.records import StopReason
from rlvr.rollout import Collector, probe
from rlvr.rollout.engine import Bucket, Completion, Engine, EngineFactory, InFlight, Published, Request

log = logging.getLogger(__name__)

# Arbitrary: all ranks come here at one place of the program, but one of them may still load from slow storage.
JOIN_SECONDS = 120.0
"""Seconds within which all ranks must connect."""
FLUSH_SECONDS = 2.0
"""Time for the replies that were sent before the end of a rank."""
LOOPBACK = "127.0.0.1"
RequestBatch = list[tuple[int, Request | None]]
"""Requests by number, made in one pass of rank 0's loop; None gives up the one of that number."""
# The contents are pickled apart, so that what cannot be read is known by its number.
RequestMessage = tuple[list[int], bytes]
"""A batch of requests on its way to a rank: the numbers, and the pickled list of requests."""
ReplyMessage = tuple[int, bytes]
"""A reply on its way to rank 0: its number, and the pickled completion or error."""
# Arbitrary: how late the accepting thread sees that all have joined.
SETTLE = 0.2
"""Seconds after which rank 0 looks whether it still waits for connections."""


def open_engine(
    spec: SpecLike,
    policy: Policy,
    in_flight: InFlight | None,
    world: World,
    collector: Collector,
    apart: bool,
    longest: int | None = None,
) -> Engine:
    """The engine that `spec` writes, for all ranks: one beside each policy, or one on rank 0 that samples for all.

    `apart` says that the weights lie in parts on the ranks, so that an engine cannot compute with the trainer's own,
    and an adapter cannot be written by one rank: it goes merged into the weights, which all ranks gather bucket by
    bucket. `longest` is the longest sequence, in tokens, that is sampled, where it is known.
    """
    startup.info("starting the engine %s", ComponentSpec.parse(spec).name)
    factory: EngineFactory = registry.build("engine", spec)
    options = factory.for_run(min(longest, policy.context) if longest else None, apart, world.heartbeat_timeout)
    # One rank needs no router: no socket is opened, and generate() is the engine's own.
    if world.size == 1:
        return options.open(policy, in_flight)
    if options.per_rank:
        return EngineRouter(options.open(policy, in_flight), world, collector)
    if world.is_main:
        engine = options.open(policy, in_flight)
    else:
        engine = None
    # All ranks must leave out the same tasks, those that are too long for the engine of rank 0.
    context = world.broadcast(None if engine is None else engine.context, "the context of the engine")
    return NullEngine(context or 0) if engine is None else engine


def verify_weight_sync(
    engine: Engine,
    world: World,
    policy: Policy,
    collector: Collector,
    weights: Callable[[], Iterable[Bucket]],
    low_precision: bool = False,
) -> None:
    """On every rank: that the engine which was given new weights samples with them. TrainingError where it does not.

    `low_precision`: it computes in less than the policy's type.
    """
    if isinstance(engine, EngineRouter):
        # Every rank probes its own engine with its own policy: under ZeRO-3 the forward pass is collective, and all are
        # here.
        probe(engine.own, policy, collector, low_precision=low_precision)
    else:  # gathering the weights once more to compare them would need the other ranks
        compared = weights if world.size == 1 else tuple
        probe(
            engine,
            policy,
            collector,
            compared,
            lambda sampled: world.broadcast(sampled, "what the engine sampled"),
            low_precision,
        )


class EngineRouter:
    """The Engine that rank 0 samples with: its own engine and those of the other ranks.

    On the other ranks it answers rank 0's requests with the rank's engine; `generate` is for rank 0 only.
    """

    def __init__(self, engine: Engine, world: World, collector: Collector) -> None:
        self.own = engine
        self.world = world
        self.collector = collector
        self.shares_weights = engine.shares_weights
        # The smallest: a request may go to any of them.
        self.context = min(world.gather(engine.context, "the contexts of the engines"))
        # `_open` and `_home` are touched on rank 0's loop alone and need no lock; `_links` is filled before the first
        # request.
        self._links: dict[int, _Link] = {}
        self._open: Counter[int] = Counter()
        self._home: dict[tuple[int, ...], tuple[int, int]] = {}
        """Prompt -> (rank, open requests)."""
        # Connection unpickles what it receives, which runs code: only who has this key (HMAC challenge of
        # multiprocessing) may send.
        key = world.broadcast(secrets.token_bytes(32), "the key of the sampling ranks")
        if world.is_main:
            self._accept(key)
        else:
            self._serve(key)

    def _accept(self, key: bytes) -> None:
        machines = self.world.gather(machine(), "the machines of the ranks")
        here = LOOPBACK if len(set(machines)) == 1 else ""  # all addresses, for ranks on other machines
        # The listening socket exists before the port is broadcast, so that no rank connects too early; it closes when
        # all have joined.
        with socket.create_server((here, 0), backlog=self.world.size) as server:
            server.settimeout(SETTLE)
            threading.Thread(
                target=self._accept_all, args=[server, key], name="rlvr-router-accept", daemon=True
            ).start()
            self.world.broadcast(server.getsockname()[1], "the port of the sampling ranks")
            self.world.barrier("the sampling ranks", JOIN_SECONDS)
            with Wait("the sampling ranks to connect to rank 0", time.monotonic() + JOIN_SECONDS) as waiting:
                while not self._all_joined():
                    waiting.check()
                    time.sleep(0.01)

    def _all_joined(self) -> bool:
        return len(self._links) == self.world.size - 1

    def _accept_all(self, server: socket.socket, key: bytes) -> None:
        """Take connections until all ranks have joined. Each proves itself on a thread of its own: one that is not of a
        rank, whatever it sends or does not send, holds up no other."""
        with contextlib.suppress(OSError):  # the server was closed
            while not self._all_joined():
                with contextlib.suppress(TimeoutError):
                    connection = Connection(server.accept()[0].detach())
                    threading.Thread(target=self._welcome, args=[connection, key], daemon=True).start()

    def _welcome(self, connection: Connection, key: bytes) -> None:
        """Take a connection of a rank, which has the key; close any other."""
        try:
            # The order of multiprocessing's Listener.accept; `Client(..., authkey)` answers and challenges in turn.
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank = connection.recv()
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("a connection to the port of the sampling ranks that is not of a rank was closed: %s", error)
            connection.close()
            return
        self._links[rank] = _Link(rank, connection)

    def _serve(self, key: bytes) -> None:
        machines = self.world.gather(machine(), "the machines of the ranks")
        port = self.world.broadcast(0, "the port of the sampling ranks")
        # By its name, which each machine resolves for itself: on rank 0's it may be a loopback address (127.0.1.1 on
        # Debian).
        if machines[0] == machine():
            host = LOOPBACK
        else:
            host = os.environ["MASTER_ADDR"]
        try:
            connection = Client((host, port), authkey=key)
        except OSError as error:
            raise TrainingError(
                f"rank {self.world.rank} cannot connect to rank 0 at {host}:{port}: {error}. MASTER_ADDR has to name "
                "rank 0's machine, and ranks have to reach its ports"
            ) from error
        connection.send(self.world.rank)
        self.world.barrier("the sampling ranks", JOIN_SECONDS)
        self._answer(connection)

    # rank 0

    @property
    def version(self) -> int:
        """The version of the weights that the engines serve."""
        return self.own.version

    async def generate(self, request: Request) -> Completion:
        """Sample one completion, on the rank that has the prompt or the least to do. LostRankError where that rank is
        gone."""
        # No `await` between choosing and counting, so the choice is of the counts as they are.
        rank = self._take(request.token_ids)
        try:
            if rank == self.world.rank:
                return await self.own.generate(request)
            return await self._links[rank].ask(request)
        finally:
            self._give(request.token_ids, rank)

    def _take(self, prompt: tuple[int, ...]) -> int:
        # A prompt's first request goes to the rank with the fewest open ones, the rest of its group follows: the engine
        # computes a prompt once for all requests that it has with it. Ties go to the lowest rank (`min`), so the choice
        # does not depend on timing where all are idle.
        rank, count = self._home.get(prompt, (None, 0))
        if rank is None:
            rank = min(range(self.world.size), key=lambda r: self._open[r])
        self._home[prompt] = rank, count + 1
        self._open[rank] += 1
        return rank

    def _give(self, prompt: tuple[int, ...], rank: int) -> None:
        self._open[rank] -= 1
        _, count = self._home[prompt]
        if count == 1:
            del self._home[prompt]
        else:
            self._home[prompt] = rank, count - 1

    # every rank

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> Published | None:
        """Take new weights, on every rank at the same place of the program."""
        return self.own.publish(version, weights)

    def release(self) -> None:
        """See the protocol."""
        self.own.release()

    def mismatched_weights(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
        """Of this rank's engine."""
        return self.own.mismatched_weights(weights)

    def close(self) -> None:
        """End the connections and this rank's engine."""
        for link in self._links.values():
            link.close()
        if not self.world.is_main:
            # The last replies may be the error that ends the run.
            self._channel.close(flush=FLUSH_SECONDS)
        self.own.close()

    # the other ranks

    def _answer(self, connection: Connection) -> None:
        """Take requests from rank 0 until it closes the connection."""
        # Touched on the collector's loop alone.
        self._running: dict[int, asyncio.Task[Completion]] = {}
        self._channel = Channel(connection, "rlvr-router", self._take_batch, self._ended)

    def _take_batch(self, message: RequestMessage) -> None:
        numbers, body = message
        try:
            batch = list(zip(numbers, pickle.loads(body), strict=True))
        except Exception as error:  # a class that cannot be imported here, say: these requests alone fail
            for number in numbers:
                self._send_reply(number, _sent(error, f"rank {self.world.rank}"))
            return
        self._submit(lambda: self._begin(batch))

    def _ended(self, cause: BaseException | None) -> None:
        if cause is not None:
            log.error("rank %d can take no more requests of rank 0: %r", self.world.rank, cause)
        # Rank 0 has closed the connection: no one reads these, and their rows would hold up a publish.
        self._submit(lambda: self._begin([(number, None) for number in self._running]))

    def _submit(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop ended with the run
            self.collector.loop.call_soon_threadsafe(work)

    def _begin(self, batch: RequestBatch) -> None:
        """Start what rank 0 asked for, in one pass of the loop, so that the engine batches it as it would on rank 0;
        None in the place of a request gives it up."""
        for number, request in batch:
            if request is not None:
                # `_running` holds the task, which asyncio itself keeps by a weak reference only.
                self._running[number] = asyncio.create_task(self.own.generate(request))
                self._running[number].add_done_callback(functools.partial(self._reply, number))
            elif number in self._running:
                self._running.pop(number).cancel()

    def _reply(self, number: int, done: asyncio.Task[Completion]) -> None:
        self._running.pop(number, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._send_reply(number, done.result())
        else:
            self._send_reply(number, _sent(error, f"rank {self.world.rank}"))

    def _send_reply(self, number: int, answer: Completion | RlvrError) -> None:
        try:
            body = pickle.dumps(answer)
        except Exception as error:  # a completion with something in it that cannot be pickled
            body = pickle.dumps(_sent(error, f"rank {self.world.rank}"))
        self._channel.send((number, body))


def _sent(error: BaseException, rank: str) -> RlvrError:
    """The exception of a rank as rank 0 raises it, in a form that can be pickled and read again."""
    failure = RemoteFailure.of(error)
    # Only our own exceptions are sent as they are: another class may not be importable, or picklable, on rank 0. Their
    # text is written for users; a traceback shows the note.
    if isinstance(error, RlvrError):
        with contextlib.suppress(Exception):
            # A copy, since this one may hold a lock, or be of a class whose `__init__` has two arguments, which is
            # pickled and cannot be read.
            copy: RlvrError = pickle.loads(pickle.dumps(error))
            copy.add_note(f"on {rank}:\n{failure.traceback}")
            return copy
    return TrainingError(f"{rank} could not sample: {failure.told(rank)}")


class _Link:
    """Rank 0's end of the connection with a rank."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.replies = Replies[Completion]()
        self._unsent: RequestBatch = []
        """Requests not yet sent; read and written in the event loop's thread alone."""
        self._channel = Channel(connection, f"rlvr-router-{rank}", self._take, self._ended)

    async def ask(self, request: Request) -> Completion:
        """Return the rank's completion of a request."""
        return await self.replies.ask(
            lambda number: self._send(number, request), lambda number: self._send(number, None)
        )

    def _send(self, number: int, request: Request | None) -> None:
        """Send it in one message with all that is asked in this pass of the loop: what the rank gets at once it samples
        in one batch. One message for each would be batched by when it arrives, and the last bits of log-probs depend on
        the batch."""
        if not self._unsent:
            # After all callbacks that are ready now, among them the other members of the group.
            asyncio.get_running_loop().call_soon(self._flush, 1)
        self._unsent.append((number, request))

    def _flush(self, seen: int) -> None:
        """Send what is asked, once a pass of the loop has added nothing to the `seen` requests."""
        if seen != len(self._unsent):
            asyncio.get_running_loop().call_soon(self._flush, len(self._unsent))
            return
        batch = self._unsent
        self._unsent = []
        try:
            body = pickle.dumps([request for _, request in batch])
        except Exception:
            batch = self._picklable(batch)
            body = pickle.dumps([request for _, request in batch])
        self._channel.send(([number for number, _ in batch], body))

    def _picklable(self, batch: RequestBatch) -> RequestBatch:
        """The requests of a batch that can be sent; the others fail."""
        good: RequestBatch = []
        for number, request in batch:
            try:
                pickle.dumps(request)
            except Exception as error:
                text = f"a request cannot be sent to rank {self.rank}: {type(error).__name__}: {error}"
                self.replies.settle([(number, TrainingError(text))])
            else:
                good.append((number, request))
        return good

    def close(self) -> None:
        """End the connection; what still waits fails."""
        self._channel.close()

    def _take(self, message: ReplyMessage) -> None:
        number, body = message
        reply: Completion | Exception
        try:
            reply = pickle.loads(body)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            reply = TrainingError(f"the reply of rank {self.rank} to a request cannot be read: {problem}")
        self.replies.settle([(number, reply)])

    def _ended(self, cause: BaseException | None) -> None:
        if cause is None:
            why = "was closed (its own output says why, if it could)"
        else:
            why = f"brought what cannot be read ({type(cause).__name__}: {cause})"
        text = f"rank {self.rank} is gone: the connection that it was to sample for {why}; go on with --resume auto"
        self.replies.fail(LostRankError, text)


class NullEngine:
    """The engine of a rank that has none: rank 0's samples for all. It helps to gather the weights that rank 0
    publishes."""

    version = 0
    shares_weights = False
    _released = True

    def __init__(self, context: int = 0) -> None:
        self.context = context
        """That of rank 0's engine."""

    async def generate(self, request: Request) -> Completion:
        """No tokens: those that rank 0 samples are the ones that count."""
        nothing = np.zeros(0)
        return Completion(
            nothing.astype(np.int64), nothing.astype(np.float32), nothing.astype(np.int32), StopReason.ABORTED, "", 0.0
        )

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> None:
        """Go through the weights, which under ZeRO-3 are gathered by all ranks together; as the engines of rank 0, not
        twice for one version without a `release` between."""
        if version == self.version and not self._released:
            return
        # The gathering of ZeRO-3 is a collective: a rank that does not take part would block rank 0's publish.
        for bucket in weights():
            del bucket  # else it would last until the next one is whole
        self.version = version
        self._released = False

    def release(self) -> None:
        """From now on the weights may change."""
        self._released = True

    def mismatched_weights(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
        """Return no names: this engine holds no weights."""
        return []

    def close(self) -> None:
        """Do nothing: this engine holds no resources."""
