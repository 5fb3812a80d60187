"""vLLM's engines that send weights, on a machine without a GPU."""

import contextlib
from types import SimpleNamespace

import torch


class Streams:
    """CUDA's streams: the default one, and two that vLLM packs weights on. Nothing waits."""

    def __init__(self):
        self.default, *self.packing = (SimpleNamespace(name=name, synchronize=lambda: None) for name in "012")
        self.current = self.default

    @contextlib.contextmanager
    def use(self, stream):
        """As torch.cuda.stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def without_cuda(setattr, device):
    """Replace the CUDA and NCCL calls of the senders: buffers are on `device`, there are no handles, and streams are
    names. Gives the `streams`, and the bytes of each broadcast by NCCL as `sent`."""
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor

    empty = torch.empty
    torch.utils._device._device_constructors()  # kept from the first call on: it has to know torch's own `empty`
    streams, sent = Streams(), []
    setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ()))
    setattr(packed_tensor, "_get_streams", lambda device, count: streams.packing[:count])
    setattr(torch, "empty", lambda *a, **k: empty(*a, **({**k, "device": device} if k.get("device") == "cuda" else k)))
    setattr(torch.cuda, "current_stream", lambda *_: streams.current)
    setattr(torch.cuda, "default_stream", lambda *_: streams.default)
    setattr(torch.cuda, "stream", streams.use)
    setattr(torch.cuda, "synchronize", lambda *_: None)
    setattr(torch.cuda, "ipc_collect", lambda: None)
    setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"GPU-{getattr(device, 'index', None) or 0}"),
    )
    setattr(torch.accelerator, "current_device_index", lambda: 0)
    setattr(torch.accelerator, "current_stream", lambda *_: streams.current)
    setattr(torch.accelerator, "synchronize", lambda *_: None)
    communicator = SimpleNamespace(
        broadcast=lambda tensor, src, stream=None: sent.append(tensor.nbytes), destroy=lambda: None
    )
    setattr(nccl_engine, "open_trainer_endpoint", lambda info: communicator)
    assert ipc_engine.packed_ipc_producer is packed_tensor.packed_ipc_producer
    assert nccl_engine.packed_nccl_broadcast_producer is packed_tensor.packed_nccl_broadcast_producer
    return SimpleNamespace(streams=streams, sent=sent)
