"""A whole update of 65,527 tokens, of all layers of Qwen2.5-0.5B and 7B: forward and backward pass, loss, metrics,
clipping and AdamW, on tensors without contents. No tensor in it has tokens along two dimensions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_peak import fake_policy, like_a_gpu, rollouts_of
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlvr import planner
from rlvr.config import OptimConfig
from rlvr.distributed import PlainBackend
from rlvr.learner import Learner
from rlvr.losses import ClippedPolicyLoss, Objective, ObjectiveTerm

# Primes, and so no dimension of a model. Together with the prompt once they fill 65,536 tokens but for nine.
PROMPT, RESPONSE, ROLLOUTS = 16_381, 8_191, 6
TOKENS = PROMPT + ROLLOUTS * RESPONSE
LONG = 2_049
"""A dimension from here on counts; the LM head's tiles have 2,048 tokens at most."""


class TokenAxes(TorchDispatchMode):
    """The operations that give a tensor with two long dimensions that are none of the model's weights'.

    A number that the host reads is 1.
    """

    def __init__(self, weights):
        super().__init__()
        self.of_weights = {size for weight in weights for size in weight.shape}
        self.wrong = set()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                tokens = [size for size in tensor.shape if size >= LONG and size not in self.of_weights]
                self.seen.update(tokens)
                if len(tokens) > 1:
                    self.wrong.add(f"{func} {tuple(tensor.shape)}")
        return output


@pytest.fixture
def shape_of():
    """`shape_of(name)`: the contents of a model's config.json."""
    shapes = json.loads(Path(planner.__file__).with_name("model_shapes.json").read_text())
    return lambda name: dict(shapes[f"Qwen/Qwen2.5-{name}"])


@pytest.fixture
def updated(monkeypatch):
    """`updated(shape, batch, attention=..., **options)`: an update of a model; what was seen, the backend, metrics."""
    real = torch.Tensor.tolist

    def values(tensor):
        return np.zeros(tuple(tensor.shape), dtype=np.float32)

    def update(shape, batch, attention="sdpa", **options):
        with like_a_gpu(all_tiles=True), pytest.MonkeyPatch.context() as patch:
            policy = fake_policy(shape, attention=attention, gradient_checkpointing=False)
            backend = PlainBackend(policy, "adamw")
            # What the host reads is not there; both reads are of one tensor a step.
            patch.setattr(torch.Tensor, "cpu", lambda tensor: SimpleNamespace(numpy=lambda: values(tensor)))
            patch.setattr(
                torch.Tensor, "tolist", lambda t: values(t).tolist() if isinstance(t, FakeTensor) else real(t)
            )
            objective = Objective(
                (ObjectiveTerm("policy", ClippedPolicyLoss(), "policy", zero_without_advantage=True),)
            )
            with TokenAxes(policy.model.parameters()) as axes:
                metrics = Learner(backend).update(batch, objective, OptimConfig(**options), 1e-6)
        return axes, backend, metrics

    return update


def batch_of(rollouts, prompt, response):
    """One group, with advantages of both signs."""
    batch = rollouts_of(1, rollouts, prompt, response)
    batch.columns["advantage"] = np.resize([1.0, -1.0], rollouts)
    batch.token_columns["weight/policy"] = [rollout.sampled.astype(np.float32) for rollout in batch.rollouts]
    return batch


@pytest.mark.parametrize("model", ["0.5B", pytest.param("7B", marks=pytest.mark.slow)])
def test_no_tensor_of_an_update_of_a_real_model_has_two_dimensions_of_tokens(model, shape_of, updated):
    shape = shape_of(model)
    batch = batch_of(ROLLOUTS, PROMPT, RESPONSE)
    axes, backend, metrics = updated(shape, batch, share_prefix=True, micro_batch_tokens=65_536)
    assert TOKENS in axes.seen  # one micro-batch, with the prompt once
    assert not axes.wrong
    assert metrics["update/steps"] == 1 and metrics["tokens/trained"] == ROLLOUTS * RESPONSE
    layers = {int(name.split("layers.")[1].split(".")[0]) for name in backend.parameters if "layers." in name}
    assert len(layers) == shape["num_hidden_layers"]
    moments = backend.optimizer.state
    assert all(moments[weight]["exp_avg"].shape == weight.shape for weight in backend.parameters.values())


GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Gemma-2-9B", "gpt-oss-20b", "Qwen3-30B-A3B"])
def test_windows_caps_sinks_and_experts_of_real_widths_have_none_either(model, request, updated, monkeypatch):
    """Four layers, of both kinds where a model has two. The keys that windows copy fit into the micro-batch as well."""
    monkeypatch.syspath_prepend(request.config.rootpath / "scripts/benchmarks")
    families = {**__import__("decode_launches").FAMILIES, "gpt-oss-20b": GPT_OSS_20B}
    shape = families[model] | {"num_hidden_layers": 4, "max_position_embeddings": 1 << 17, "pad_token_id": 0}
    shape.pop("attention", None)
    budget = PROMPT + ROLLOUTS * (RESPONSE + shape.get("sliding_window", 0))
    axes, _, metrics = updated(
        shape, batch_of(ROLLOUTS, PROMPT, RESPONSE), "eager", share_prefix=True, micro_batch_tokens=budget
    )
    assert TOKENS in axes.seen
    assert not axes.wrong
    assert metrics["update/steps"] == 1


def test_scores_of_all_pairs_of_tokens_are_seen(shape_of, updated):
    """The same check finds the scores of one padded row of eager attention."""
    shape = shape_of("0.5B") | {"num_hidden_layers": 1}
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][:1]
    axes, _, _ = updated(shape, batch_of(1, 1_009, 2_003), attention="eager", packing=False, share_prefix=False)
    # The last token of a rollout predicts nothing, and is not computed.
    assert any(f"{1_009 + 2_003 - 1}, {1_009 + 2_003 - 1})" in found for found in axes.wrong)
