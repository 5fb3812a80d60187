"""Run by test_plan.py in a process of its own, since DeepSpeed keeps a process group: the bytes that a rank of ZeRO
holds.

Prints JSON: stage and type -> two numbers, after an optimizer step and before the next.
"""

from __future__ import annotations

import json

import torch

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.distributed import DeepSpeedOptions
from rlvr.distributed.plain import optimizer_tensors
from rlvr.policy import load_policy

SCRATCH = {"hidden_size": 64, "layers": 3, "intermediate_size": 128, "context": 256}


def held(backend) -> int:
    """Bytes of all storages of weights, float32 weights, gradients and optimizer state, each counted once."""
    zero = backend.optimizer
    tensors = [*backend.shards.flats(), *backend.shards.gradient_buffers(), *optimizer_tensors(backend.shards.inner)]
    for parameter in backend.policy.model.parameters():
        tensors += [getattr(parameter, "ds_tensor", parameter), parameter.grad, getattr(parameter, "grad_accum", None)]
    for groups in (getattr(zero, "averaged_gradients", {}), getattr(zero, "all_grad_tensors", {})):
        for group in groups.values():
            tensors += group or []
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def measured(zero_stage: int, dtype: str) -> list[int]:
    """Bytes after an optimizer step and before the next."""
    config = ModelConfig(scratch=ScratchConfig(**SCRATCH), device="cpu", dtype=dtype)
    policy = load_policy(config, shared_out=zero_stage == 3)
    backend = DeepSpeedOptions(zero_stage=zero_stage).open(policy, "adamw")
    result = []
    ids = torch.arange(8)[None]
    for steps in (True, False):
        backend.zero()
        for _ in range(2):
            backend.backward(policy.hidden_states(ids, ids).float().square().sum())
        if steps:
            backend.step(1e-3, 1.0)
        result.append(held(backend))
    return result


def main() -> None:
    torch.set_num_threads(1)
    result = {f"{stage} {dtype}": measured(stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
