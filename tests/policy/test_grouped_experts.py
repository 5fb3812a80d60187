"""Experts under autocast: multiplied in its type, with values and gradients near those of float64."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from architectures import ARCHITECTURES, policy_of
from rlvr.policy.grouped_experts import GROUPED, NAME

MIXTURES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


class Products(TorchDispatchMode):
    """The types of the operands of grouped products."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._grouped_mm.default:
            self.types.append({one.dtype for one in args[:2]})
        return function(*args, **(kwargs or {}))


def passed(model, ids, dtype):
    """Logits and the gradients of a weighted sum of them, computed in `dtype` by autocast."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16), Products() as products:
        logits = model(ids, use_cache=False).logits
        spread = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        (logits * spread).sum().backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if "experts" in name}
    return logits.double(), gradients, products.types


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_are_multiplied_in_the_type_of_autocast(architecture):
    model = policy_of(architecture, ARCHITECTURES[architecture]).causal_lm
    assert model.config._experts_implementation == NAME
    ids = torch.arange(24).view(2, 12) * 7 % 50
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation(
        "eager"
    )  # a loop over experts, without grouped products, of which float64 has none
    want, of_want, none = passed(exact, ids, torch.float64)
    got, of_got, types = passed(model, ids, torch.bfloat16)
    assert not none and types and all(one == {torch.bfloat16} for one in types)
    # 8 bits of precision, over two layers. Tokens near the edge between two experts may choose the other one, hence the
    # norm and not the largest difference.
    assert (got - want).norm() < 0.05 * want.norm()
    assert of_got.keys() == of_want.keys() and of_got
    for name, gradient in of_got.items():
        assert (gradient - of_want[name]).norm() < 0.1 * of_want[name].norm(), name
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_without_autocast_they_are_transformers_own(architecture):
    model = policy_of(architecture, ARCHITECTURES[architecture]).causal_lm
    ids = torch.arange(24).view(2, 12) * 7 % 50
    ours = model(ids, use_cache=False).logits
    model.set_experts_implementation(GROUPED)
    assert torch.equal(model(ids, use_cache=False).logits, ours)


def test_the_name_is_in_no_checkpoint(tmp_path):
    model = policy_of("mixtral", ARCHITECTURES["mixtral"]).causal_lm
    model.save_pretrained(tmp_path)
    assert "rlvr" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_a_dense_model_is_left_alone():
    assert policy_of("llama", ARCHITECTURES["llama"]).causal_lm.config._experts_implementation != NAME
