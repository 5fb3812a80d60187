"""What only a GPU can show: the same contracts in float32 and bfloat16 on the device, and a run that learns there."""

import asyncio

import numpy as np
import pytest
import torch

from rlvr import GRPOTrainer
from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.core.needs import Need
from rlvr.policy import forward, load_policy, rows_of
from rlvr.records import Batch, Task
from rlvr.rollout import HFEngine, Request, Sampling, make_rollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def rollouts_and_gap(dtype, adapter=None):
    scratch = ScratchConfig(hidden_size=256, layers=4, intermediate_size=512, context=256, init_std=0.08)
    policy = load_policy(ModelConfig(scratch=scratch, device="cuda", dtype=dtype, adapter=adapter))
    engine = HFEngine(policy)

    async def sample():
        prompts = [tuple(range(5, 5 + n)) for n in (3, 40, 17)]
        requests = [Request(prompts[i % 3], Sampling(64, 0.8), seed=i) for i in range(24)]
        return await asyncio.gather(*(engine.generate(r) for r in requests)), requests

    completions, requests = asyncio.run(sample())
    draws = [type("D", (), {"number": i, "task": Task(str(i), "")})() for i in range(24)]
    rollouts = [make_rollout(d, 0, r, c) for d, r, c in zip(draws, requests, completions, strict=True)]
    trained = [r.sampled for r in rollouts]
    rows = rows_of(Batch(rollouts), np.arange(24), trained, 0, policy.device)
    with torch.no_grad():
        ours = forward(policy, rows, [Need("logprobs")])["logprobs", "current"]
    return (ours - torch.from_numpy(rows.at_trained([r.behaviour_logprobs for r in rollouts])).to(ours.device)).abs()


def test_float32_gap():
    assert float(rollouts_and_gap("float32").max()) < 1e-3  # TF32 is off by default


def test_bfloat16_gap():
    gap = rollouts_and_gap("bfloat16")
    assert float(gap.mean()) < 0.02


def test_bfloat16_gap_with_an_adapter():
    assert float(rollouts_and_gap("bfloat16", LoraConfig(r=8)).mean()) < 0.02


@pytest.mark.parametrize("adapter", [None, {"r": 8}])
def test_a_run_in_bfloat16_learns(tmp_path, adapter):
    config = {
        "run": {"dir": str(tmp_path), "steps": 40},
        "model": {"scratch": {"init_std": 0.1}, "adapter": adapter, "gradient_checkpointing": True},
        "rollout": {"prompts_per_step": 8, "group_size": 16, "max_new_tokens": 16},
        "optim": {"lr": 0.01 if adapter else 3e-3, "micro_batch_size": 32},
        "logging": {"console": "off", "rollouts": 0},
    }

    def share_of_even_digits(completion):
        return sum(c in "02468" for c in completion) / max(1, len(completion))

    with GRPOTrainer(None, [f"k={i}:" for i in range(10)], share_of_even_digits, config) as trainer:
        rows = trainer.train()
    assert trainer.policy.device.type == "cuda"
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3
    assert max(row["mismatch/mean"] for row in rows) < 0.05
