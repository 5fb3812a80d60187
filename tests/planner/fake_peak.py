"""The peak of the tensors of one micro-batch, forward and backward, of a model of any size: the update's own code runs
on fake tensors, which have shapes and no contents, and every storage is counted from the operation that made it to its
last reference.

Fake tensors are on a CPU, whose attention kernels keep other things than a GPU's: `gpu_attention` (padded rows) and
`TorchFlash` (packed ones) call those that a GPU takes. Temporaries inside a kernel are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from rlvr.config import ModelConfig, OptimConfig, ScratchConfig
from rlvr.core.needs import Need
from rlvr.losses import ClippedPolicyLoss, Denominators, TokenBatch
from rlvr.planner.decoder_passes import LiveBytes, to_cpu
from rlvr.policy import MicroBatch, Policy, forward, fused_head, head_tiles, micro_batches
from rlvr.policy.attention import Packing, hook, merged
from rlvr.policy.attention.calls import ScoreRule, Segments
from rlvr.policy.attention.kernels import Kernel, TorchFlash, kernel_for, kernels_of
from rlvr.policy.head_devices import tile_for
from rlvr.policy.loading import make_policy
from rlvr.policy.scratch import build_tokenizer
from rlvr.records import Batch, Origin, Rollout, StopReason, Task


def gpu_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """scaled_dot_product_attention with the operators that torch takes on a GPU in bfloat16: flash without a mask,
    memory-efficient with one, whose mask becomes a bias of the queries' type
    (aten/src/ATen/native/transformers/attention.cpp: convert_boolean_attn_mask, pad_bias: rows of a multiple of 16)."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if bias.shape[-1] % 16:
        bias = torch.nn.functional.pad(bias, (0, -bias.shape[-1] % 16))[..., : attn_mask.shape[-1]]
    bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]


ALL_TILES = fused_head.tiles
GPU_MEMORY = 80 << 30
"""Bytes of the GPU that tests have in mind."""


@contextlib.contextmanager
def like_a_gpu(all_tiles: bool = False) -> Iterator[FakeTensorMode]:
    """Fake tensors inside, and what a GPU would take where code looks at the device or at values.

    Of the LM head's tiles, which follow each other in the same memory, only some stand for all, unless `all_tiles`.
    """
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", gpu_attention)
        patch.setattr(merged, "kernel_for", gpu_kernel)
        # It reads values, and for rows without packed sequences gives None; with spans in place nothing looks at it.
        patch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
        head_like_a_gpu(patch, kernels=True)
        if not all_tiles:
            patch.setattr(fused_head, "tiles", first_and_last)
        yield mode


def gpu_kernel(query: torch.Tensor, value: torch.Tensor, segments: Segments, scoring: ScoreRule) -> Kernel:
    """Flash attention, of whatever type the tensors are; with a soft-cap that of a GPU without flash-attn: tiles."""
    if scoring.softcap is None:
        return TorchFlash()
    with kernels_of("cuda"):
        return kernel_for(query, value, segments, scoring)


def head_like_a_gpu(patch: pytest.MonkeyPatch, kernels: bool, memory: int = GPU_MEMORY) -> None:
    """Let the LM head take the tiles of a GPU of so many bytes, with Triton's kernels, which allocate nothing, or
    without."""
    nothing = SimpleNamespace(add_tile=lambda *_: None, gradient_tile=lambda *_: None)
    patch.setattr(fused_head, "tile_size", lambda device: tile_for(memory))
    patch.setattr(fused_head, "sums_wide", lambda device: True)
    patch.setattr(fused_head, "INTERPRETED", kernels)
    patch.setattr(fused_head, "triton_kernels", lambda: nothing)


def first_and_last(tokens: int, plan: head_tiles.TilePlan) -> Iterator[tuple[slice, list[slice]]]:
    """Some tiles for all, which follow each other in the same memory."""
    columns = list(ALL_TILES(tokens, plan))
    for part, rows in columns[:2] + columns[2:][-1:]:
        yield part, rows[:2] + rows[2:][-1:]


def fake_policy(shape: dict[str, Any], deepspeed: bool = False, **options: Any) -> Policy:
    """A policy of the model that `shape` (the contents of a config.json) describes. `options`: of ModelConfig;
    `deepspeed`: whether weights that train are in bfloat16, as DeepSpeed's are."""
    config = ModelConfig(**{"dtype": "bfloat16", "device": "cpu", **options})
    described = AutoConfig.for_model(**shape)
    kept = torch.float32 if config.adapter is None else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=kept, attn_implementation=config.attention)
        policy = make_policy(model, build_tokenizer(ScratchConfig()), config)
    if deepspeed:
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    to_cpu(policy.model)
    hook(policy.causal_lm)
    # tried on values, of which there are none
    policy.head_is_enough = True
    policy.packing = Packing(True, True)
    return policy


def rollouts_of(groups: int, members: int, prompt: int, completion: int) -> Batch:
    """Rollouts whose completions are trained; those of a group have the prompt in common, which is a token shorter in
    each group."""
    made = []
    longest = prompt
    for group in range(groups):
        prompt = longest - group
        for member in range(members):
            ids = np.full(prompt + completion, 3, dtype=np.int64)
            ids[prompt] = 4 + member  # no more in common than the prompt
            made.append(
                Rollout(
                    id=f"{group}/{member}",
                    task=Task(str(group), "?"),
                    group=str(group),
                    member=member,
                    token_ids=ids,
                    origin=np.repeat([Origin.PROMPT, Origin.POLICY], [prompt, completion]).astype(np.int8),
                    behaviour_logprobs=np.zeros(len(ids), dtype=np.float32),
                    policy_version=np.zeros(len(ids), dtype=np.int32),
                    stop=StopReason.END,
                    temperature=1.0,
                )
            )
    return Batch(made)


def micro_batch(policy: Policy, batch: Batch, config: OptimConfig) -> MicroBatch:
    """All rollouts of `batch` as the one micro-batch that `config` makes of them."""
    trained = [rollout.sampled for rollout in batch.rollouts]
    (rows,) = micro_batches(policy, batch, np.arange(len(batch)), trained, config)
    return rows


@dataclass(frozen=True)
class Peak:
    """Bytes."""

    weights: int
    gradients: int
    rest: int
    """What the micro-batch takes beside them, at its peak."""


def measure(policy: Policy, rows: MicroBatch, gradients_stay: bool = True) -> Peak:
    """Of the forward pass, GRPO's loss and the backward pass; with gradients there from the beginning, as the plain
    backend's are, or taken away as soon as they are computed, as by DeepSpeed."""
    loss = ClippedPolicyLoss()
    weights = list(policy.model.parameters())
    for parameter in policy.trainable().values():
        if gradients_stay:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    gradients = [p.grad for p in weights if p.grad is not None]
    inputs = [value for value in vars(rows).values() if isinstance(value, torch.Tensor)]
    with policy.training(), LiveBytes([*weights, *gradients, *inputs, *policy.model.buffers()]) as live:
        statistics = forward(policy, rows, [*loss.needs, Need("logprobs"), Need("entropy")])
        logprobs = statistics["logprobs", "current"]
        ones = torch.ones_like(logprobs)
        tokens = TokenBatch(
            sequence=rows.row,
            sequences=len(rows.index),
            weight=ones,
            advantage=ones,
            proximal_logprobs=logprobs.detach(),
            behaviour_logprobs=torch.zeros_like(logprobs),
            statistics=statistics,
        )
        term = loss(tokens, Denominators(float(len(logprobs)), float(len(rows.index)), 1.0))
        del statistics, tokens, logprobs, ones
        live.in_backward = True
        term.value.backward()
    return Peak(sum(w.nbytes for w in weights), sum(g.nbytes for g in gradients), live.peak)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
