"""The ways to need less memory: activations in host memory, and optimizers with less state."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from rlvr import registry
from rlvr.config import ModelConfig, ScratchConfig
from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.losses.reference_test import compares_with_reference
from rlvr.policy import adamw, load_policy
from rlvr.policy.optimizers import adamw_8bit
from small_run import beside, overlaid

SCRATCH = {"hidden_size": 64, "layers": 3, "intermediate_size": 128, "context": 256}


def model_of(**options) -> ModelConfig:
    return ModelConfig(scratch=ScratchConfig(**SCRATCH), device="cpu", **options)


def test_offloaded_activations_give_the_same_gradients_and_pass_through_the_host(monkeypatch):
    packed = []
    inner = torch.autograd.graph.save_on_cpu

    class Counting(inner):
        def __init__(self, pin_memory):
            super().__init__(pin_memory=False)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (packed.append(tensor.shape), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counting)
    ids = torch.arange(24).reshape(2, 12)
    gradients = []
    for offload in (False, True):
        policy = load_policy(model_of(gradient_checkpointing=True, activation_offload=offload))
        with torch.no_grad():
            policy.hidden_states(ids, torch.ones_like(ids), torch.arange(12).expand(2, -1))
        assert not packed
        with policy.training():
            policy.hidden_states(ids, torch.ones_like(ids), torch.arange(12).expand(2, -1)).square().sum().backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    assert torch.Size([2, 12, 64]) in packed
    assert len(gradients[0]) == len(gradients[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_offload_without_checkpointing_is_refused():
    with pytest.raises(ValueError, match="set `gradient_checkpointing: true`"):
        model_of(activation_offload=True, gradient_checkpointing=False)


def descend(make, steps: int = 30) -> tuple[list[float], torch.nn.Parameter, torch.optim.Optimizer]:
    """Least squares with one matrix of 128 x 64; the losses."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(128, 64, generator=generator) / 8)
    x, y = torch.randn(256, 128, generator=generator), torch.randn(256, 64, generator=generator)
    optimizer, losses = make([weight]), []
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (x @ weight - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, weight, optimizer


def test_adamw_is_the_paper_s_formula():
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = adamw([weight], betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.05
    expected, first, second = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step, gradient in enumerate([(0.5, -1.0), (0.25, 3.0), (-1.0, 0.1)], start=1):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        for i, g in enumerate(gradient):
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.9 * second[i] + 0.1 * g * g
            move = (first[i] / (1 - 0.8**step)) / ((second[i] / (1 - 0.9**step)) ** 0.5 + 1e-6)
            expected[i] -= 0.05 * (move + 0.1 * expected[i])
    assert weight.tolist()[0] == pytest.approx(expected, rel=1e-5)


def test_adamw_in_8_bits_learns_like_adamw_with_a_quarter_of_the_state():
    pytest.importorskip("bitsandbytes")
    plain, _, full = descend(adamw)
    small, weight, optimizer = descend(adamw_8bit)
    assert small[-1] == pytest.approx(plain[-1], rel=0.05) and small[-1] < 0.9 * small[0]

    def state_bytes(of: torch.optim.Optimizer) -> int:
        return sum(
            v.nbytes for state in of.state.values() for v in state.values() if torch.is_tensor(v) and v.numel() > 1
        )

    assert {v.dtype for v in optimizer.state[weight].values() if torch.is_tensor(v)} >= {torch.uint8}
    assert (
        state_bytes(optimizer) < state_bytes(full) / 2.5
    )  # the quantiles' tables weigh something on so small a matrix


def test_the_state_of_adamw_in_8_bits_is_taken_back(tmp_path):
    pytest.importorskip("bitsandbytes")
    _, weight, optimizer = descend(adamw_8bit, 5)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = torch.nn.Parameter(weight.detach().clone())
    again = adamw_8bit([other])
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for parameter, of in ((weight, optimizer), (other, again)):
        parameter.grad = torch.ones_like(parameter)
        of.step()
    assert torch.equal(weight, other)


def test_adamw_in_8_bits_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("bitsandbytes"))):
        adamw_8bit([torch.nn.Parameter(torch.zeros(2, 2))])


@pytest.mark.gate
def test_a_reference_is_counted_where_the_stage_keeps_one(make_trainer):
    """For every loss and every further term."""
    written = [{"loss": name} for name in registry.names("loss")]
    written += [
        {"auxiliary": [{"name": n, **({"token": "?"} if n == "last_token" else {})}]}
        for n in registry.names("auxiliary")
    ]
    written += [{"kl": {"coef": 0.1, "where": where}} for where in ("loss", "reward", "advantage")] + [
        {"kl": {"coef": 0.0}}
    ]
    kept = {}
    for number, algorithm in enumerate(written):
        tree = overlaid({"algorithm": algorithm}, beside(algorithm.get("loss")))
        trainer = make_trainer(tree, f"run-{number}")
        counted = compares_with_reference(trainer.config.algorithm)
        assert counted == trainer.stages[0].keeps_reference == (trainer.stages[0].reference is not None), algorithm
        kept[str(algorithm)] = counted
        trainer.close()
    # copg, dpo, ipo, kto, leftover_lunch, outcome_classifier, and the three places of a penalty
    assert sum(kept.values()) == 9
