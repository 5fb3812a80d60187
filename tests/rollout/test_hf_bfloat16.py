"""The gap between sampling and training log-probs where computing is in bfloat16 (by autocast, weights in float32)."""

import numpy as np
import pytest
import torch
from engine_helpers import ask, some_requests

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.core.needs import Need
from rlvr.policy import forward, load_policy, make_policy, rows_of
from rlvr.records import Batch, Task
from rlvr.rollout import HFEngine, make_rollout


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4)])
def test_the_gap_is_small_and_weights_that_train_stay_in_float32(adapter):
    scratch = ScratchConfig(hidden_size=64, layers=2, context=128, init_std=0.1)
    policy = load_policy(ModelConfig(scratch=scratch, device="cpu", dtype="bfloat16", adapter=adapter))
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    requests = some_requests(policy, 12, seed=1)
    completions = ask(HFEngine(policy), requests)
    draws = [type("Draw", (), {"number": i, "task": Task(str(i), "")})() for i in range(12)]
    rollouts = [make_rollout(d, 0, r, c) for d, r, c in zip(draws, requests, completions, strict=True)]
    rows = rows_of(Batch(rollouts), np.arange(12), [r.sampled for r in rollouts], 0, policy.device)
    with torch.no_grad():
        ours = forward(policy, rows, [Need("logprobs")])["logprobs", "current"]
    gap = (ours - torch.from_numpy(rows.at_trained([r.behaviour_logprobs for r in rollouts])).to(ours.device)).abs()
    assert 0 < float(gap.mean()) < 0.02


def test_a_model_given_in_bfloat16_trains_in_float32():
    given = load_policy(ModelConfig(scratch=ScratchConfig(hidden_size=32, layers=1), device="cpu"))
    policy = make_policy(given.model.to(torch.bfloat16), given.tokenizer, ModelConfig(device="cpu"))
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert (
        policy.causal_lm.get_output_embeddings().weight is policy.causal_lm.get_input_embeddings().weight
    )  # still tied
