"""Weights from GPU to GPU by vLLM's own weight transfer: NCCL between processes, CUDA IPC on one device.

vLLM's trainer-side engines drive the update through a client with four methods, which here go to whatever `call` reaches
(the pipe of an engine or all servers at once), and pack the weights into buffers of bounded size. Written against vLLM
0.32; it needs a GPU, so the tests on a CPU reach only what is given to vLLM, not the transfer itself.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlvr.errors import WaitTimeout
from rlvr.rollout.engine import Published
from rlvr.rollout.vllm.transfer import Call, Weights
from rlvr.waits import finished

BUFFER_BYTES = 256 << 20
"""Size of the buffers that weights are packed into."""


class Source(WeightSource):
    """The weights of a publish, as vLLM iterates over them."""

    def __init__(self) -> None:
        self.weights: Weights = tuple
        self._described: list[ParamMeta] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Names, types and shapes; they are those of the first publish in all that follow."""
        if self._described is None:
            self._described = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._described

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.weights():
            yield from bucket


class Control:
    """vLLM's client protocol over `call`."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self.call("init_weight_transfer_engine", init_info=init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self.call("shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """See vLLM's VLLMWeightSyncClient."""
        self.call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The version is set by the commit that follows every update."""
        self.call("finish_weight_update")


class GPUTransfer:
    """See rlvr.rollout.vllm.transfer.Transfer. The meeting of both sides is held at the first publish, and again when the
    group of engines has changed: NCCL cannot lose or take in a member."""

    def __init__(self, info: TrainerInitInfo, deadline: float = math.inf) -> None:
        self.info, self.deadline = info, deadline
        """`deadline`: seconds for one send, where it may wait for an engine that is gone, as in a collective of NCCL."""
        self.source = Source()
        self._engine: Any = None

    def send(self, weights: Weights, call: Call) -> Published:
        """See the protocol."""
        start = time.perf_counter()
        self.source.weights = weights
        try:
            _in_a_thread(lambda: self._send(call), "the weights to reach all vLLM servers", self.deadline)
        except WaitTimeout:
            self._engine = None  # its group lacks a member, and even to close it would wait for that one
            raise
        sent = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in self.source.metadata())
        return Published(sent, time.perf_counter() - start)

    def _send(self, call: Call) -> None:
        if self._engine is None:
            self._engine = WeightTransferTrainerFactory.trainer_init(
                self.info, client=Control(call), source=self.source
            )
        self._engine.client = Control(call)
        self._engine.send_weights()

    def close(self) -> None:
        """See the protocol."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


def ipc_transfer() -> GPUTransfer:
    """To an engine on the same device."""
    return GPUTransfer(IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=BUFFER_BYTES))


def nccl_transfer(address: str, workers: int, deadline: float) -> GPUTransfer:
    """To `workers` processes of servers, which reach the trainer at `address`, within `deadline` seconds each time."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return GPUTransfer(
        NCCLTrainerInitInfo(
            rank=0,
            master_address=address,
            master_port=port,
            world_size=1 + workers,
            packed=True,
            packed_buffer_size_bytes=BUFFER_BYTES,
        ),
        deadline,
    )


def _in_a_thread(work: Callable[[], None], what: str, seconds: float) -> None:
    """Do `work`, which cannot be interrupted, on a thread of its own. WaitTimeout names `what` where it takes longer."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    done: Future[None] = Future()

    def run() -> None:
        try:
            if device is not None:  # each thread has its own
                torch.cuda.set_device(device)
            work()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rlvr-publish", daemon=True).start()
    finished(done, what, time.monotonic() + seconds)
    done.result()
