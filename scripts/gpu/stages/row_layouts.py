"""Packed rows for measurements, and log-probs and gradients of packed rows, shared prompts and trees of shared runs
against padded rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from rlvr.config import OptimConfig
from rlvr.core.needs import CURRENT, Need
from rlvr.policy import Policy, forward, micro_batches
from rlvr.policy.attention import Spans
from rlvr.records import Batch
from stages.context import Context
from stages.models import load, made_up, model_section

LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "share_prefix": False},
    "shared": {"share_prefix": True},
    "tree": {"share_prefix": True},
}
GROUP = 4
"""Responses of each of the two prompts."""
SHARED = 0.25
"""Share of a row's tokens that are the prompt which all its runs continue."""
RESPONSES = 8
"""Runs of such a row."""


def compared(context: Context, dtype: str) -> dict[str, dict[str, float]]:
    """By layout: the largest difference of a log-prob to padded rows (nats), the norm of the gradients' difference over
    the norm of the padded rows' gradient, and how many runs a token sees at most before its own."""
    # In float32 the activations of all layers are over 80 GB.
    policy = load(model_section(context, "0.5B", dtype=dtype, gradient_checkpointing=True))
    prompt, response = (16, 512) if context.toy else (1024, 4096)
    plain = made_up(policy, 2 * GROUP, prompt, response, GROUP)
    found = {}
    for layout, options in LAYOUTS.items():
        batch = branching(plain, prompt, response) if layout == "tree" else plain
        want, of_want, _ = measured(policy, batch, {"packing": False})
        got, of_got, depth = measured(policy, batch, options)
        found[layout] = {
            "logprob": float(np.abs(got - want).max()),
            "gradient": float((of_got - of_want).norm() / of_want.norm()),
            "depth": depth,
        }
    return found


def branching(batch: Batch, prompt: int, response: int) -> Batch:
    """The same rollouts, each second one with half a response in common with the one before."""
    rollouts = list(batch.rollouts)
    for second in range(1, len(rollouts), 2):
        ids = rollouts[second].token_ids.copy()
        common = prompt + response // 2
        ids[:common] = rollouts[second - 1].token_ids[:common]
        rollouts[second] = dataclasses.replace(rollouts[second], token_ids=ids)
    return Batch(rollouts)


def measured(policy: Policy, batch: Batch, options: dict[str, Any]) -> tuple[np.ndarray, torch.Tensor, int]:
    """Log-probs of the trained tokens, rollout after rollout; the gradient of their sum in float32 on the CPU, flat;
    and the most runs that a run of a packed row continues."""
    trained = [rollout.sampled for rollout in batch.rollouts]
    values = [np.zeros(len(rollout)) for rollout in batch.rollouts]
    depth = 0
    for parameter in policy.trainable().values():
        parameter.grad = None
    for rows in micro_batches(policy, batch, np.arange(len(batch)), trained, OptimConfig(**options)):
        with policy.training():  # where checkpointing is on
            logprobs = forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", CURRENT]
            logprobs.sum().backward()
        every = np.zeros(int(rows.lengths.sum()))
        every[rows.flat] = logprobs.detach().float().cpu().numpy()
        parts = np.split(every, np.cumsum(rows.lengths)[:-1])
        for index, part in zip(rows.index, parts, strict=True):
            values[index] = part
        if rows.spans is not None:
            depth = max(len(rows.spans.chain(run)) for run in range(len(rows.spans.length)))
    gradients = [p.grad.float().flatten().cpu() for p in policy.trainable().values() if p.grad is not None]
    return np.concatenate(values), torch.cat(gradients), depth


def runs_of(length: int, prefix: float) -> tuple[int, list[int]]:
    """Tokens of the shared prompt, and of each of the runs behind it, in a row of `length` tokens."""
    shared = int(prefix * length)
    own = (length - shared) // RESPONSES
    return shared, [own] * (RESPONSES - 1) + [length - shared - own * (RESPONSES - 1)]


def shared_row(length: int, prefix: float, device: str) -> Spans:
    """A packed row of `length` tokens: 8 runs, behind a prompt that they share or without one."""
    return _row(*runs_of(length, prefix), device)


def uneven_row(length: int, prefix: float, device: str) -> Spans:
    """Such a row of nine runs, the first of two thirds of what is not prompt: a window of half the row cuts there."""
    shared = int(prefix * length)
    first = 2 * (length - shared) // 3
    _, others = runs_of(length - shared - first, 0.0)
    return _row(shared, [first, *others], device)


def _row(shared: int, runs: list[int], device: str) -> Spans:
    """Runs behind a prompt of `shared` tokens, or without one where it is 0."""
    before = [shared] if shared else []
    contexts = [-1] * len(before) + [0 if shared else -1] * len(runs)
    return Spans(np.asarray(before + runs), np.asarray(contexts), torch.device(device))
