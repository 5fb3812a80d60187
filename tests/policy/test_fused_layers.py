"""Liger's kernels in a model's layers: when they are taken, and what is refused. Liger is not installed here: its
functions are replaced by ones with the same parameters."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest
import torch

from rlvr.config import LoraConfig, ModelConfig, ScratchConfig
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.policy import fused_layers, load_policy
from rlvr.policy.fused_layers import fuse_layers


@pytest.fixture
def policy():
    """A policy on a CPU whose home is a GPU, so that the kernels are wanted; its trial runs on the CPU."""
    made = load_policy(ModelConfig(scratch=ScratchConfig(), device="cpu"))
    made.home = torch.device("cuda")
    return made


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for Liger's table of functions, which notes its calls; `factor` and `slope` spoil a norm."""

    class Table(dict):
        factor = 1.0
        slope = 1.0
        calls: list

    table = Table()
    table.calls = []

    def apply(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=False, model=None):
        table.calls.append(
            {
                "rope": rope,
                "rms_norm": rms_norm,
                "swiglu": swiglu,
                "losses": cross_entropy or fused_linear_cross_entropy,
            }
        )
        norm = model.base_model.norm
        own = norm.forward
        # The value is `factor` times the norm, its derivative `slope` times.
        norm.forward = lambda x: table.slope * own(x) + (table.factor - table.slope) * own(x).detach()

    table["qwen3"] = apply
    package = ModuleType("liger_kernel")
    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = table
    for name, stand_in in {
        "liger_kernel": package,
        "liger_kernel.transformers": ModuleType("liger_kernel.transformers"),
        "liger_kernel.transformers.monkey_patch": module,
    }.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: object())
    monkeypatch.setattr(fused_layers, "_trial", trial_on_cpu)
    return table


def trial_on_cpu(policy):
    """The trial, on the device where the weights are."""
    home, policy.home = policy.home, policy.device
    try:
        return REAL_TRIAL(policy)
    finally:
        policy.home = home


REAL_TRIAL = fused_layers._trial


@pytest.mark.parametrize("asked", ["auto", True])
def test_the_kernels_that_liger_has_for_the_family_are_put_in_and_its_losses_are_not(policy, liger, asked):
    fuse_layers(policy, asked)
    # `swiglu` is off in the function's own defaults, and stays off.
    assert liger.calls == [{"rope": True, "rms_norm": True, "swiglu": False, "losses": False}]


def test_false_and_a_cpu_leave_the_model_as_it_is(policy, liger):
    fuse_layers(policy, False)
    policy.home = torch.device("cpu")
    fuse_layers(policy, "auto")
    assert liger.calls == []
    with pytest.raises(ConfigError, match=r"model\.fused_layers: true, but the model is on a CPU"):
        fuse_layers(policy, True)


def test_a_family_without_kernels(policy, liger):
    del liger["qwen3"]
    fuse_layers(policy, "auto")
    with pytest.raises(ConfigError, match="Liger has no kernels for models of type 'qwen3'"):
        fuse_layers(policy, True)


def test_asked_for_and_not_installed(monkeypatch):
    monkeypatch.setattr(fused_layers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"but liger-kernel is not installed: {re.escape(install_command('liger'))}"):
        load_policy(ModelConfig(scratch=ScratchConfig(), device="cpu", fused_layers=True))


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_kernels_that_compute_something_else_are_refused(policy, liger, factor):
    liger.factor = factor
    liger.slope = factor
    with pytest.raises(ConfigError, match=r"kernels \(rope, rms_norm\) the model's hidden states differ .*: false"):
        fuse_layers(policy, "auto")


@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4)])
@pytest.mark.parametrize("slope", [2.0, -1.0, 0.0])
def test_kernels_with_another_gradient_are_refused(liger, slope, adapter):
    policy = load_policy(ModelConfig(scratch=ScratchConfig(), device="cpu", adapter=adapter))
    policy.home = torch.device("cuda")
    liger.slope = slope
    with pytest.raises(ConfigError, match=r"the model's gradients differ by .* set model\.fused_layers: false"):
        fuse_layers(policy, True)


def test_a_model_of_which_nothing_trains_is_tried_by_its_hidden_states(policy, liger):
    policy.model.requires_grad_(False)
    fuse_layers(policy, "auto")
    liger.factor = 2.0
    with pytest.raises(ConfigError, match="hidden states"):
        fuse_layers(policy, "auto")


def test_weights_that_wait_elsewhere_are_not_tried(policy):
    assert fused_layers._trial(policy) is None
