"""Nothing is random in a model that is trained, but an adapter's dropout, and that in the gradient alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy import make_policy as policy_of
from rlvr.policy.scratch import build_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_heads": 4,
    "d_model": 32,
    "max_position_embeddings": 64,
    "num_local_experts": 2,
    "attention_types": [[["global"], 2]],
}
NOISY = ("drop", "jitter")
"""In the names of what is random in training mode: dropout of all kinds, LayerDrop, the noise of routers."""


def noisy_model(architecture, tokenizer):
    """A tiny model in whose configuration everything random is at 0.5."""
    plain = AutoConfig.for_model(architecture)
    known = {name for name in SIZES if hasattr(plain, name)}
    random = {
        name: 0.5
        for name, value in plain.to_dict().items()
        if any(word in name for word in NOISY) and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    sizes = {name: SIZES[name] for name in known}
    config = AutoConfig.for_model(
        architecture, **sizes, **random, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert random, "an architecture without anything random tests nothing"
    return model


@pytest.mark.parametrize(
    "architecture",
    ["gpt2", "opt", "gpt_neo", "bloom", "falcon", "starcoder2", "phi", "xglm", "biogpt", "mixtral", "phimoe", "qwen2"],
)
def test_gradient_checkpointing_makes_nothing_random(architecture):
    """A pass of an update gives the very numbers of evaluation mode, and the configuration that is saved is the
    model's."""
    tokenizer = build_tokenizer(ScratchConfig())
    model = noisy_model(architecture, tokenizer)
    before = model.config.to_dict()
    ids = torch.arange(24)[None] % 60 + 10
    positions = torch.arange(24)[None]
    model.eval()
    with torch.no_grad():
        want = model(input_ids=ids).logits
        model.train()
        assert not torch.equal(model(input_ids=ids).logits, want), "the model's own training mode is random"
    policy = policy_of(model, tokenizer, ModelConfig(gradient_checkpointing=True, device="cpu"))
    recomputed = []
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            plain = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = lambda *a, plain=plain, **k: recomputed.append(1) or plain(*a, **k)
    with policy.training():
        for _ in range(2):
            got = policy.own_logits(ids, positions)
            assert torch.equal(got, want)
        got.sum().backward()
        with policy.evaluating():
            assert not any(module.training for module in model.modules())
        assert any(module.training for module in model.modules())
    assert recomputed, "checkpointing was on"
    assert not any(module.training for module in model.modules())
    assert model.config.to_dict() == before


@pytest.mark.gate
@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_a_run_with_gradient_checkpointing_measures_no_dropout(make_trainer, architecture):
    """At the first step the policy is the reference and the engine's: kl/ref is 0 and the mismatch is rounding."""
    rows = {}
    for checkpointing in (False, True):
        model = {"scratch": {"architecture": architecture, "kv_heads": 2}, "gradient_checkpointing": checkpointing}
        over = {"model": model, "algorithm": {"kl": {"coef": 0.1}}, "run": {"steps": 1}, "optim": {"lr": 1e-9}}
        with make_trainer(over, name=f"{architecture}-{checkpointing}") as trainer:
            (rows[checkpointing],) = trainer.train()
    assert rows[True]["kl/ref"] == 0.0 and rows[True]["mismatch/max"] < 1e-4
    assert rows[True]["grad_norm"] == pytest.approx(rows[False]["grad_norm"], rel=1e-4)


@pytest.mark.gate
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_adapters_dropout_is_in_the_gradient_alone(make_trainer, checkpointing):
    """With an adapter that is not fresh: KL, mismatch and ratio are those of a run without dropout, the gradient is
    not."""
    rows = {}
    for dropout in (0.0, 0.5):
        model = {"adapter": {"r": 4, "dropout": dropout}, "gradient_checkpointing": checkpointing}
        over = {
            "model": model,
            "algorithm": {"kl": {"coef": 0.1}},
            "run": {"steps": 3},
            "optim": {"lr": 1e-7, "updates_per_batch": 2},
        }
        with make_trainer(over, name=f"run-{dropout}") as trainer:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for name, parameter in trainer.policy.trainable().items():
                    if "lora_B" in name:
                        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            trainer.enter(0)
            rows[dropout] = trainer.train()
    for row, plain in zip(rows[0.5], rows[0.0], strict=True):
        assert row["kl/ref"] == pytest.approx(0.0, abs=1e-8)
        assert row["mismatch/max"] < 1e-4
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-4)
        assert abs(row["grad_norm"] - plain["grad_norm"]) > 1e-3 * plain["grad_norm"]


def test_without_dropout_asked_for_an_adapter_that_has_it_is_not_random(make_policy):
    """A loaded adapter keeps its dropout only where model.adapter.dropout asks for it."""
    first = make_policy(adapter={"r": 2, "dropout": 0.5})
    with torch.no_grad():
        for name, parameter in first.trainable().items():
            if "lora_B" in name:
                parameter.normal_()
    ids, positions = torch.arange(10)[None] + 5, torch.arange(10)[None]
    for asked in (0.0, 0.5):
        scratch = {"hidden_size": 32, "layers": 2, "intermediate_size": 64, "context": 96, "init_std": 0.2}
        config = ModelConfig(
            scratch=ScratchConfig(**scratch),
            device="cpu",
            adapter={"r": 2, "dropout": asked},
            gradient_checkpointing=True,
        )
        policy = policy_of(first.model, first.tokenizer, config)
        with torch.no_grad():
            want = policy.own_logits(ids, positions)
            with policy.training():
                same = torch.equal(policy.own_logits(ids, positions), want)
        assert same == (asked == 0.0) == (not policy.adapter_dropout)


def test_the_reference_pass_is_without_dropout(make_policy):
    """`evaluating` inside `training` turns an adapter's dropout off, whatever passes it encloses."""
    policy = make_policy(adapter={"r": 4, "dropout": 0.5})
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if "lora_B" in name:
                parameter.normal_()
        ids, positions = torch.arange(10)[None] + 5, torch.arange(10)[None]
        want = policy.own_logits(ids, positions)
        with policy.training(), policy.evaluating():
            got = policy.own_logits(ids, positions)
    assert np.array_equal(got.numpy(), want.numpy())
