"""The installed Liger-Kernel is what `rlvr.policy.fused_layers` expects: its table, the parameters of its functions,
and what they replace. Its kernels need a GPU and are not run; without Liger nothing of this is tested."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.policy.fused_layers import KERNELS, _apply, _function

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed (pip install 'rlvr[liger]')")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "phi3")
"""Families whose layers Liger has kernels for, in the version that the extra `liger` asks for."""


def tiny(family):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(family, **sizes, **(experts if family.endswith("moe") else {}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_a_function_with_the_parameters_that_are_given_to_it(family):
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[family]).parameters
    assert "model" in parameters
    kernels = [name for name in KERNELS if name in parameters]
    assert "rms_norm" in kernels and {"swiglu", "geglu"} & set(kernels)
    assert all(isinstance(parameters[name].default, bool) for name in kernels)
    # Losses that are on by default have to be known, so that they can be turned off.
    on = {name for name, parameter in parameters.items() if parameter.default is True}
    assert on <= {*KERNELS, "cross_entropy", "fused_linear_cross_entropy"}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_modules_get_ligers_methods_and_the_models_loss_stays(family, monkeypatch):
    model = tiny(family)
    # Liger also replaces functions and classes in the model's file, for all models that the process makes later.
    file = import_module(type(model).__module__)
    for name, value in list(vars(file).items()):
        if callable(value):
            monkeypatch.setattr(file, name, value)
    forward = type(model).forward
    assert _function(model) is not None
    assert set(_apply(model)) == {"rope", "rms_norm", "swiglu"}
    layer = model.model.layers[0]
    for module in (model.model.norm, layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):
        assert module.forward.__func__.__module__.startswith("liger_kernel"), module
    assert file.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    assert type(model).forward is forward and "forward" not in vars(model)
