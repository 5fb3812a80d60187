"""Compiled layers give the log-probs and gradients of those that are not: by torch's tracing and autograd graphs on
every run (`aot_eager`), by generated code where that is marked slow."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from rlvr.config import LoraConfig, ModelConfig, OptimConfig, ScratchConfig
from rlvr.core.needs import Need
from rlvr.errors import ConfigError
from rlvr.policy import compiled_layers, forward, load_policy, micro_batches
from rlvr.policy.compiled_layers import compile_layers, keep_compiled_code
from rlvr.records import Batch, Origin, Rollout, StopReason, Task


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """Nothing compiled, and no setting, is of another test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def policy_of(layers=3, **options):
    scratch = ScratchConfig(hidden_size=32, layers=layers, heads=2, kv_heads=1, intermediate_size=48)
    return load_policy(ModelConfig(scratch=scratch, device="cpu", **options), seed=3)


def batch_of(members, prompt, response):
    """A group of rollouts with one prompt, whose responses differ in length."""
    rollouts = []
    for member in range(members):
        length = prompt + response + member
        ids = (np.arange(length) * (member + 3)) % 40 + 3
        ids[:prompt] = np.arange(prompt) + 3
        rollouts.append(
            Rollout(
                id=str(member), task=Task("t", "?"), group="g", member=member, token_ids=ids,
                origin=np.repeat([Origin.PROMPT, Origin.POLICY], [prompt, length - prompt]).astype(np.int8),
                behaviour_logprobs=np.zeros(length, dtype=np.float32),
                policy_version=np.zeros(length, dtype=np.int32), stop=StopReason.END, temperature=1.0,
            )
        )  # fmt: skip
    return Batch(rollouts)


def update(policy, batch, **optim):
    """Log-probs of a batch and the gradients of their weighted sum."""
    where = [rollout.sampled for rollout in batch.rollouts]
    policy.model.zero_grad()
    found = []
    for rows in micro_batches(policy, batch, np.arange(len(batch)), where, OptimConfig(**optim)):
        with policy.training():
            logprobs = forward(policy, rows, [Need("logprobs", grad=True)])["logprobs", "current"]
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append(logprobs.detach())
    return torch.cat(found), {name: p.grad.clone() for name, p in policy.trainable().items()}


def check(want, got):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert set(got[1]) == set(want[1])
    for name, gradient in want[1].items():
        size = float(gradient.abs().max())
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-5 * max(size, 1e-3), msg=name)


WAYS = {
    "padded": {"packing": False},
    "packed": {"packing": True, "share_prefix": False},
    "shared": {"share_prefix": True},
}
SIZES = [(2, 4, 9), (3, 5, 14), (4, 7, 21), (2, 9, 30)]


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("padded", {}),
        ("shared", {"gradient_checkpointing": True}),
        pytest.param("padded", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("shared", {"adapter": LoraConfig(r=4)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probs_and_gradients_are_those_of_layers_that_are_not_compiled(way, options):
    policy = policy_of(layers=2, **options)
    batches = [batch_of(*size) for size in SIZES[:2]]
    want = [update(policy, batch, **WAYS[way]) for batch in batches]
    compile_layers(policy.causal_lm, backend="aot_eager")
    got = [update(policy, batch, **WAYS[way]) for batch in batches]
    assert counters["stats"]["unique_graphs"] > 0
    for mine, right in zip(got, want, strict=True):
        check(right, mine)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_layers_share_a_graph_and_new_lengths_compile_nothing(way):
    def graphs(layers):
        torch._dynamo.reset()
        counters.clear()
        policy = policy_of(layers=layers)
        compile_layers(policy.causal_lm, backend="aot_eager")
        seen = []
        for size in SIZES:
            update(policy, batch_of(*size), **WAYS[way])
            seen.append(counters["stats"]["unique_graphs"])
        return seen

    few = graphs(2)
    assert few[0] > 0 and few[1] == few[2] == few[3]
    assert graphs(4) == few


def test_a_layer_with_a_cache_is_not_compiled():
    policy = policy_of()
    assert policy.head_is_enough  # tried once, without a cache, by the first pass that needs to know
    compile_layers(policy.causal_lm, backend="aot_eager")
    ids = torch.arange(8).view(2, 4) + 3
    policy.next_logits(ids, None, torch.arange(4).expand(2, -1), DynamicCache())
    assert counters["stats"]["unique_graphs"] == 0


def test_a_copy_of_the_model_is_not_compiled_and_has_the_same_parameters():
    policy = policy_of()
    names = list(policy.model.state_dict())
    compile_layers(policy.causal_lm, backend="aot_eager")
    assert list(policy.model.state_dict()) == names
    copied = copy.deepcopy(policy.causal_lm)
    assert all(module._compiled_call_impl is None for module in copied.modules())


def test_the_option_compiles_and_is_refused_where_it_cannot(monkeypatch):
    assert policy_of(compile=True).causal_lm.base_model.layers[0]._compiled_call_impl is not None
    scratch = ScratchConfig()
    with pytest.raises(ConfigError, match=r"model\.compile does not go with distributed\.zero_stage 3"):
        load_policy(ModelConfig(scratch=scratch, device="cpu", compile=True), shared_out=True)
    monkeypatch.setattr(compiled_layers, "GradientCheckpointingLayer", torch.nn.LSTM)
    with pytest.raises(ConfigError, match="decoder layers of Qwen3ForCausalLM are not known to transformers"):
        policy_of(compile=True)


def test_compiled_code_is_kept_in_the_users_cache_unless_a_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/somewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("RLVR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "rlvr" / "inductor")


GENERATED = """
import json, sys
sys.path[:0] = [{tests!r}, {folder!r}]
import torch
from torch._dynamo.utils import counters
from test_compiled_layers import WAYS, batch_of, check, policy_of, update
plain, compiled = policy_of(layers=2), policy_of(layers=2, compile=True)
for way in ("padded", "shared"):
    batch = batch_of(3, 5, 14)
    check(update(plain, batch, **WAYS[way]), update(compiled, batch, **WAYS[way]))
print(json.dumps({{k: counters["inductor"][k] for k in ("fxgraph_cache_hit", "fxgraph_cache_miss")}}))
"""


@pytest.mark.slow
def test_generated_code_gives_the_same_and_the_next_start_finds_it(tmp_path):
    """Two processes, one after the other, with inductor and its C++ compiler."""
    here = os.path.dirname(__file__)
    code = GENERATED.format(tests=os.path.dirname(here), folder=here)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kept")}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    ]
    first, second = (json.loads(run.stdout.splitlines()[-1]) for run in runs)
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_hit"] > 0 and second["fxgraph_cache_miss"] == 0
