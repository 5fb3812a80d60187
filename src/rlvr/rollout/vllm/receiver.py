"""Inside vLLM's workers: weights that arrive through shared memory, and proof of what arrived.

Imported by vLLM as its `worker_extension_cls`, which is also how the transfer `shared_memory` gets into vLLM's
registry, beside its own `nccl` and `ipc`, and how every worker process is tied to the life of the trainer and can be
asked for the stacks of its threads.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlvr.core.process import parent_death, tracing
from rlvr.rollout.vllm.transfer import SHARED_MEMORY, checksum


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class SharedBucket(WeightTransferUpdateInfo):
    """Tensors in a file in memory: `path` can be opened by processes of the same user on the same machine."""

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Copies by name: vLLM keeps what it is given until the layer is whole, and the memory is used again."""
        copies = []
        # ACCESS_COPY: torch.frombuffer warns about memory that cannot be written to; nothing is written, so nothing is
        # copied.
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            for name, dtype, shape, offset in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
                kind = getattr(torch, dtype)
                count = torch.Size(shape).numel()
                view = torch.frombuffer(memory, dtype=kind, count=count, offset=offset)
                copies.append((name, view.reshape(shape).clone()))
                # The mapping cannot be closed while a view of it exists (BufferError).
                del view
        return copies


class SharedMemoryEngine(WeightTransferEngine[Nothing, SharedBucket]):
    """Takes checkpoint-format weights bucket by bucket, through vLLM's layer-wise reload."""

    init_info_cls = Nothing
    update_info_cls = SharedBucket
    loaded: set[str] | None = None
    """The model's own parameters that the last update reached; None before one, and where the model does not say."""

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """See the base class."""

    def start_weight_update(self) -> None:
        """See the base class."""
        # vllm/model_executor/model_loader/reload: keeps a layer's weights until all have come, then processes them into
        # the memory that the layer has, so that CUDA graphs and compiled code stay valid.
        initialize_layerwise_reload(self.model)
        self.loaded = set()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See the base class, whose own waits for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedBucket) -> None:
        """See the base class."""
        model: Any = self.model
        # Names of the model's own parameters that were set, or None: some models of vLLM return nothing.
        loaded = model.load_weights(update_info.tensors())
        if self.loaded is None or loaded is None:
            self.loaded = None
        else:
            self.loaded = self.loaded | loaded

    def finish_weight_update(self) -> None:
        """See the base class."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """See the base class."""


class WorkerExtension:
    """Methods that workers get beside vLLM's own; called by `collective_rpc`."""

    model_runner: Any
    weight_transfer_engine: Any

    def rlvr_model(self, keys: list[str]) -> dict[str, Any]:
        """These entries of the model's text configuration, where it has them."""
        config = self.model_runner.model_config.hf_text_config.to_dict()
        return {key: config[key] for key in keys if key in config}

    def rlvr_weights(self, shapes: dict[str, list[int]]) -> dict[str, Any]:
        """Return a report on this worker's weights: `checksums` by Hugging Face name, None where it cannot be told (a
        weight that was packed for its kernel, split over workers or quantised); `unreached`: parameters that the last
        update left as they were."""
        model = self.model_runner.get_model()
        mine = dict(model.named_parameters(remove_duplicate=False))
        # An attribute of vLLM's models: fused module -> its parts in order, such as qkv_proj -> q_proj, k_proj, v_proj.
        packed = getattr(model, "packed_modules_mapping", {})
        alone = get_tensor_model_parallel_world_size() == 1
        # One byte a value: quantised when it arrived, and laid out for its kernel.
        plain_values = {name: held for name, held in mine.items() if held.element_size() > 1}
        checksums = {name: _checksum(name, shapes, plain_values, packed, alone) for name in shapes}
        engine = self.weight_transfer_engine
        unreached: list[str] = []
        if isinstance(engine, SharedMemoryEngine) and engine.loaded is not None:
            unreached = sorted({name.replace(".base_layer.", ".") for name in mine} - engine.loaded)
        # Adapters have ways of their own, and scales are computed from the weights that arrived.
        sent = [name for name in unreached if ".lora_" not in name and not name.endswith("_scale")]
        return {"checksums": checksums, "unreached": sent}


def _checksum(
    name: str, shapes: dict[str, list[int]], mine: dict[str, torch.Tensor], packed: dict[str, list[str]], alone: bool
) -> str | None:
    """Checksum of one Hugging Face weight in the model's parameters, or of its rows in a fused one."""
    owner, _, leaf = name.rpartition(".")
    parent, _, module = owner.rpartition(".")
    for fused, parts in packed.items():
        if module in parts:
            # Fused weights [sum of rows, in] hold their parts one above the other.
            rows = [shapes.get(f"{parent}.{part}.{leaf}", [0])[0] for part in parts]
            first = sum(rows[: parts.index(module)])
            whole = mine.get(f"{parent}.{fused}.{leaf}")
            if whole is None or whole.shape[0] != sum(rows):
                return None
            return checksum(whole[first : first + rows[parts.index(module)]])
    held = mine.get(name)
    if held is None or held.ndim != len(shapes[name]) or held.shape[0] < shapes[name][0]:
        return None
    if alone:
        # vLLM pads the rows of a vocabulary to a multiple of 64 (vocab_parallel_embedding.py).
        held = held[: shapes[name][0]]  # a vocabulary is padded at its end
    if list(held.shape) == shapes[name]:
        return checksum(held)
    return None


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryEngine)
if os.environ.get(parent_death.OWNER):
    # Here, because vLLM imports this module in every worker process that it starts itself.
    parent_death.die_with_parent()
    tracing.write_stacks()
