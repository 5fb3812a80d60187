"""Models of real shapes with random weights, and made-up batches of rollouts for them: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlvr.config import ModelConfig
from rlvr.policy import Policy, load_policy
from rlvr.records import Batch, Origin, Rollout, StopReason, Task
from stages.context import Context

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate_size": 8960},
    "7B": {
        "hidden_size": 3584,
        "layers": 28,
        "heads": 28,
        "kv_heads": 4,
        "intermediate_size": 18944,
        "tie_word_embeddings": False,
    },
}
"""The shapes of Qwen2.5, as in the config.json of its repositories."""
VOCABULARY = 151936
TOY = {"hidden_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 96}
"""What stands in for all of them on a CPU; vLLM's attention there takes heads of 32 at least."""
TOY_VOCABULARY = 300
SURROGATES = range(0xD800, 0xE000)
"""Code points that are no characters."""


def model_section(context: Context, name: str, **options: Any) -> dict[str, Any]:
    """The `model` section of a configuration for a shape, computed in bfloat16 on the stage's device."""
    shape = TOY if context.toy else SHAPES[name]
    alphabet = characters((TOY_VOCABULARY if context.toy else VOCABULARY) - 6)  # 6: the special tokens of the tokenizer
    scratch = {"architecture": "qwen2", "context": 32768, "init_std": 0.02, **shape, "alphabet": alphabet}
    return {"scratch": scratch, "device": context.device, "dtype": "bfloat16", **options}


def characters(count: int) -> str:
    """So many different characters, digits and signs first; each is a token of the tokenizer that is built."""
    last = 32 + count + len(SURROGATES)
    return "".join(chr(code) for code in range(32, last) if code not in SURROGATES)[:count]


def load(section: dict[str, Any]) -> Policy:
    """The policy of a `model` section, its weights made on the device: billions of random numbers take minutes on a
    CPU."""
    with torch.device(section["device"]):
        return load_policy(ModelConfig(**section))


def parameters(policy: Policy) -> dict[str, int]:
    """How many weights the layers and the LM head have; the input embedding multiplies nothing."""
    head = policy.causal_lm.get_output_embeddings().weight
    embedding = policy.causal_lm.get_input_embeddings().weight
    others = sum(p.numel() for p in policy.causal_lm.parameters() if p is not head and p is not embedding)
    return {"layers": others, "head": head.numel()}


def made_up(policy: Policy, rollouts: int, prompt: int, response: int, group: int = 1, seed: int = 0) -> Batch:
    """A scored batch of random tokens: `rollouts` of equal length, each `group` of them behind one prompt."""
    rng = np.random.default_rng(seed)
    vocabulary = len(policy.tokenizer)
    found = []
    for number in range(rollouts):
        if number % group == 0:
            question = rng.integers(6, vocabulary, prompt)
        ids = np.concatenate([question, rng.integers(6, vocabulary, response)])
        origin = np.where(np.arange(len(ids)) < prompt, Origin.PROMPT, Origin.POLICY).astype(np.int8)
        sampled = origin == Origin.POLICY
        known = np.where(sampled, -np.log(vocabulary), np.nan).astype(np.float32)
        versions = np.where(sampled, 0, -1).astype(np.int32)
        task = Task(str(number // group), "?")
        found.append(Rollout(str(number), task, task.id, number % group, ids, origin, known, versions, StopReason.END))
    advantage = np.where(np.arange(rollouts) % 2 == 0, 1.0, -1.0)  # none is 0: every rollout costs its passes
    batch = Batch(found, {"advantage": advantage})
    batch.token_columns["weight/policy"] = [r.sampled.astype(np.float32) for r in found]
    return batch
