"""Weights from GPU to GPU by vLLM's own weight transfer: NCCL between processes, CUDA IPC on one device.

vLLM's trainer-side engines drive the update through a client with five methods, which here go to `call` (the pipe of an
engine or all servers at once), and pack the weights into a buffer. Written against vLLM 0.32 and 0.33. The tests run
vLLM's own engines on a CPU and replace the CUDA and NCCL calls alone.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlvr.core.device_memory import record_event
from rlvr.core.waits import Wait
from rlvr.errors import TrainingError, WaitTimeoutError
from rlvr.rollout.engine import Bucket, Published
from rlvr.rollout.vllm.transfer import Call, Weights
from rlvr.rollout.weights import Description

# Arbitrary, as large as a bucket of weights (rollout/weights.py, BUCKET_BYTES). vLLM's default is 1 GiB and is taken
# beside the engine.
BUFFER_BYTES = 256 << 20
"""Least size of the buffers that weights are packed into."""


def buffer_bytes(weights: Sequence[Description]) -> int:
    """Size of a buffer for these weights: the largest has to fit in as a whole. vLLM refuses by IPC what does not, such
    as the embedding of 150,000 tokens."""
    return max(BUFFER_BYTES, max((weight.nbytes for weight in weights), default=0))


def held_bytes(info: IPCTrainerInitInfo | NCCLTrainerInitInfo, weights: Sequence[Description]) -> int:
    """The most bytes that vLLM takes to send these weights.

    By IPC that is one buffer. For NCCL (`pack_tensors` and `packed_nccl_broadcast_producer` of vLLM 0.32) tensors are
    gathered until they exceed the buffer's size, then joined into a chunk; the chunks before it are kept until they are
    sent. While tensors are gathered they outlive the buckets that they come from.
    """
    if isinstance(info, IPCTrainerInitInfo):
        return info.packed_buffer_size_bytes
    # Bytes of each chunk in the order in which they are sent. At its peak vLLM holds the tensors gathered for one
    # chunk, the joined chunk itself and those of the `kept` before it that are being sent.
    chunks = [0]
    for weight in weights:
        if chunks[-1] > info.packed_buffer_size_bytes:
            chunks.append(0)
        chunks[-1] += weight.nbytes
    kept = info.packed_num_buffers
    return max(chunk + sum(chunks[max(0, last + 1 - kept) : last + 1]) for last, chunk in enumerate(chunks))


class _Weights(WeightSource):
    """The weights of a publish, as vLLM iterates over them. What is sent is known from shapes alone: under ZeRO-3 a
    pass over the weights is collective, and every rank makes one for each publish."""

    def __init__(self, weights: Sequence[Description]) -> None:
        self.weights: Weights = tuple
        self.check: Callable[[], None] = lambda: None
        """Raises an error once the current send has been given up."""
        self.described = [ParamMeta(weight.name, weight.dtype, tuple(weight.shape)) for weight in weights]

        self.progress = math.inf
        """When a weight was last asked for, in time.monotonic seconds; inf before the first."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        check = self.check  # of this pass: the next send sets its own
        buckets = iter(self.weights())
        # `while` and not `for`: the loop variable of a `for` keeps the old bucket alive while the next one is made.
        while (bucket := _made(buckets, check)) is not None:
            yield from self._timed(bucket, check)
            del bucket  # else it would last until the next one is made

    def _timed(self, bucket: Bucket, check: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in bucket:
            check()
            # vLLM takes the next weight when its buffer has space, so the time of the last one shows whether the
            # receivers still take any.
            self.progress = time.monotonic()
            yield weight

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`__iter__` as vLLM 0.33 calls it."""
        return iter(self)


def _made(buckets: Iterator[Bucket], check: Callable[[], None]) -> Bucket | None:
    """The next bucket, for any stream to read; None after the last.

    vLLM's `packed_nccl_broadcast_producer` asks for weights and copies them on two CUDA streams in turn, and a bucket
    is made when its first weight is asked for, so that some of it would be copied on another stream than it is made on.
    All are made on the default stream instead: torch's allocator keeps memory for the stream that it was taken on, and
    the two take none of this one's.
    """
    torch.cuda.synchronize()  # weights that were freed may be copied still, and their memory is used again
    check()  # it may have waited for a broadcast that was aborted
    # The thread that sends may have another current stream (vLLM's producer sets one of its own).
    with torch.cuda.stream(torch.cuda.default_stream()):
        bucket = next(buckets, None)
    torch.cuda.synchronize()  # the optimizer's step as well, where the weights are the trainer's own
    return bucket


def _metadata(source: _Weights) -> list[ParamMeta]:
    return source.described


# A method in vLLM 0.32; 0.33 refuses classes in which it is anything but a cached property.
AS_PROPERTY = isinstance(vars(WeightSource)["metadata"], property)
Source: Callable[[Sequence[Description]], _Weights] = type(
    "Source", (_Weights,), {"metadata": cached_property(_metadata) if AS_PROPERTY else _metadata}
)


class Control:
    """vLLM's client protocol over `call`, for one send. `failed` gets what an engine raises instead of doing its part,
    or why the send was given up. vLLM looks at that only when its own part is over, and it may never be: the handshake
    and the broadcast wait for a member that does not take part."""

    def __init__(self, call: Call, failed: Future[None]) -> None:
        self.call = call
        self.failed = failed

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self._tell("init_weight_transfer_engine", init_info=init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self._tell("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self._tell("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self._tell("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is set by the commit that follows every update."""
        self._tell("finish_weight_update")

    def _tell(self, method: str, **arguments: Any) -> None:
        self.check()
        try:
            self.call(method, **arguments)
        except Exception as error:
            # vLLM's sender may be inside the handshake or a broadcast and never look at what this call raised; `_wait`
            # sees the future.
            self.fail(error)
            raise
        self.check()  # vLLM would go on to the weights

    def fail(self, error: BaseException) -> None:
        """End the send: no method and no weight goes out from now on. The first error is kept."""
        # Set from the sending thread and from the waiting one; only the first counts.
        with contextlib.suppress(InvalidStateError):
            self.failed.set_exception(error)

    def check(self) -> None:
        """TrainingError once the send has failed: its thread may still run, beside that of the next send."""
        if self.failed.done():
            raise TrainingError("this send of the weights was given up")


class GPUTransfer:
    """See rlvr.rollout.vllm.transfer.Transfer. Both sides join their group (the handshake) at the first publish, and
    again when the group of engines has changed or a send has failed: NCCL cannot lose or add a member."""

    def __init__(
        self,
        info: IPCTrainerInitInfo | NCCLTrainerInitInfo,
        weights: Sequence[Description],
        deadline: float = math.inf,
        stall_timeout: float = math.inf,
    ) -> None:
        self.info = info
        self.deadline = deadline
        self.stall_timeout = stall_timeout
        """Seconds for one send, and seconds after its first weight in which no further one is taken: a collective of
        NCCL waits for an engine that is gone. Before the first weight there is the handshake, which takes as long as
        the servers' workers need."""
        self.source = Source(weights)
        self.bytes = sum(weight.nbytes for weight in weights)
        self.held = held_bytes(info, weights)
        self._engine: Any = None
        self._lock = threading.Lock()
        """Held while `_engine` is set: a handshake that was given up may end at any time."""

    def send(self, weights: Weights, call: Call) -> Published:
        """See the protocol. WaitTimeoutError where no weight follows another for `stall_timeout` seconds, or not all
        are taken by the deadline; what an engine answers instead of doing its part is raised at once."""
        start = time.perf_counter()
        client = Control(call, Future())
        self.source.weights = weights
        self.source.check = client.check
        self.source.progress = math.inf
        record_event("trainer", "buffer", self.held)
        try:
            # In a thread, because neither NCCL nor vLLM's sender can be interrupted: the trainer's thread waits for a
            # future with a deadline instead, and can still notice that a rank is lost.
            self._wait(_in_a_thread(lambda: self._send(client)), client.failed)
        except BaseException as error:
            # First the flag, then the abort: the thread of this send may wake up from the abort and must not go on.
            client.fail(error)
            # The kernel of a broadcast that lacks a member would stay on the GPU, and every later `synchronize` wait
            # for it. vLLM aborts the group (PyNcclCommunicator.destroy of 0.32), which waits for no other process, and
            # for 5 s at most.
            self.close()
            raise
        record_event("trainer", "buffer", -self.held)
        return Published(self.bytes, time.perf_counter() - start)

    def _wait(self, done: Future[None], failed: Future[None]) -> None:
        """Until the weights are sent. Raises what the sender or an engine raises; WaitTimeoutError by the deadline and
        the stall timeout."""
        what = "the weights to reach all vLLM servers"
        with Wait(what, time.monotonic() + self.deadline) as waiting:
            # 0.1 s bounds how late a deadline or a lost rank is seen.
            while not wait([done, failed], timeout=0.1, return_when=FIRST_COMPLETED).done:
                waiting.check()
                if time.monotonic() > self.source.progress + self.stall_timeout:
                    raise WaitTimeoutError(
                        f"no weight was taken for {self.stall_timeout:.0f} s while {what} was waited for"
                    )
        (done if done.done() else failed).result()

    def _send(self, client: Control) -> None:
        engine = self._engine or self._opened(client)
        engine.client = client
        engine.send_weights()

    def _opened(self, client: Control) -> Any:
        """vLLM's engine, after its handshake. TrainingError where the send was given up meanwhile."""
        engine = WeightTransferTrainerFactory.trainer_init(self.info, client=client, source=self.source)
        with self._lock:
            # Under the lock `close` either sees the engine and shuts it down, or this thread sees that the send was
            # given up.
            given_up = client.failed.done()
            if not given_up:
                self._engine = engine
        if given_up:
            engine.shutdown()
        client.check()
        return engine

    def close(self) -> None:
        """See the protocol."""
        with self._lock:
            engine = self._engine
            self._engine = None
        if engine is not None:
            engine.shutdown()


def ipc_transfer(weights: Sequence[Description]) -> GPUTransfer:
    """For these weights, to an engine on the same device."""
    return GPUTransfer(IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes(weights)), weights)


def nccl_transfer(
    weights: Sequence[Description], address: str, workers: int, deadline: float, stall_timeout: float = math.inf
) -> GPUTransfer:
    """For these weights, to `workers` processes of servers, which reach the trainer at `address`, within `deadline`
    seconds each time; given up where no weight follows another for `stall_timeout` seconds."""
    with socket.socket() as probe:
        # Port 0: the kernel chooses a free one. Another process may take it before the group's store binds it; the
        # handshake then fails.
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    info = NCCLTrainerInitInfo(
        rank=0,
        master_address=address,
        master_port=port,
        # Rank 0 of the group is the trainer; the workers of each server follow from `rank_offset` on.
        world_size=1 + workers,
        packed=True,
        packed_buffer_size_bytes=buffer_bytes(weights),
    )
    return GPUTransfer(info, weights, deadline, stall_timeout)


def _in_a_thread(work: Callable[[], None]) -> Future[None]:
    """Do `work`, which cannot be interrupted, on a thread of its own."""
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
    else:
        device = None
    done: Future[None] = Future()

    def run() -> None:
        try:
            if device is not None:  # each thread has its own
                torch.cuda.set_device(device)
            work()
            done.set_result(None)
        except BaseException as error:
            # BaseException, and handed over: an error that stayed in the thread would leave the trainer waiting for the
            # deadline.
            done.set_exception(error)

    threading.Thread(target=run, name="rlvr-publish", daemon=True).start()
    return done
