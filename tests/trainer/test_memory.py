"""What a run needs: the dry run's estimate against models and a run that are really there, and the ways to need less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rlvr import planner
from rlvr.config import Config, ModelConfig, ScratchConfig
from rlvr.dry_run import memory_lines
from rlvr.errors import ConfigError
from rlvr.policy import adamw, load_policy
from rlvr.policy.optimizers import adamw_8bit
from rlvr.stage_plan import stage_plans

SCRATCH = {"hidden_size": 64, "layers": 3, "intermediate_size": 128, "context": 256}
BIG = {"hidden_size": 256, "layers": 4, "intermediate_size": 1024, "context": 512}
RUN = {
    "run": {"steps": 2},
    "model": {"scratch": BIG, "device": "cpu"},
    "data": {"train": {"name": "arithmetic", "count": 20}, "max_prompt_tokens": 16},
    "rollout": {"max_new_tokens": 112, "prompts_per_step": 8, "group_size": 4, "ignore_eos": True},
    "logging": {"console": "off", "rollouts": 0},
    "evaluation": {"at_start": False, "at_end": False},
}


def model_of(**options) -> ModelConfig:
    return ModelConfig(scratch=ScratchConfig(**SCRATCH), device="cpu", **options)


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_weights_are_counted_as_a_loaded_model_has_them(adapter):
    config = model_of(adapter=adapter)
    model = load_policy(config).model
    shape = planner.shape_of(config)
    assert shape.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.weights == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gemma2", "mistral"])
def test_activations_are_what_a_real_forward_pass_keeps(architecture):
    config = ModelConfig(scratch=ScratchConfig(**SCRATCH, architecture=architecture), device="cpu")
    policy = load_policy(config)
    own = {p.data_ptr() for p in policy.model.parameters()}
    kept = {}
    ids = torch.arange(256).reshape(4, 64) % 90

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.hidden_states(ids, torch.ones_like(ids), torch.arange(64).expand(4, -1))
    measured = sum(storage.nbytes() for storage in kept.values()) / 256
    shape = planner.shape_of(config)
    assert shape.kept + 64 * shape.scores == pytest.approx(measured, rel=0.2)
    assert (shape.scores > 0) == (
        architecture == "gemma2"
    )  # the one with a soft-cap, which is computed by eager attention


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"model": {"scratch": BIG, "device": "cpu", "gradient_checkpointing": True}}, marks=pytest.mark.slow
        ),
        pytest.param({"model": {"scratch": BIG, "device": "cpu", "dtype": "bfloat16"}}, marks=pytest.mark.slow),
        pytest.param({"optim": {"micro_batch_size": 4}}, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_the_peak_of_a_real_run(changes, tmp_path):
    tree = {**RUN, **changes, "run": {"steps": 2, "dir": str(tmp_path)}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    program = Path(__file__).with_name("measure_memory.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run.yaml")], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = float(done.stdout.split()[-1]) * 2**20
    config = Config(**tree)
    estimated = sum(planner.parts(planner.shape_of(config.model), config).values())
    assert 1 / 1.4 < estimated / measured < 1.4, (estimated / 2**20, measured / 2**20)


def test_each_setting_that_is_to_need_less_needs_less():
    def needed(**changes) -> dict[str, float]:
        config = Config(**{**RUN, **changes})
        return planner.parts(planner.shape_of(config.model), config)

    plain = needed()
    assert needed(optim={"optimizer": "adamw_8bit"})["optimizer"] < plain["optimizer"] / 3
    assert "optimizer" not in needed(optim={"optimizer": "sgd"})
    # sampling may be the larger of the two phases, and the optimizer's state is then away
    sampling = {"rollout": {**RUN["rollout"], "prompts_per_step": 512}}
    small = {"micro_batch_size": 1, "optimizer": {"name": "sgd", "momentum": 0.9}}
    assert needed(optim=small, **sampling)["optimizer"] == plain["optimizer"] / 2
    assert "optimizer" not in needed(optim=small, distributed={"offload_during_rollout": True}, **sampling)
    assert needed(optim={"micro_batch_size": 8})["activations"] == pytest.approx(plain["activations"] / 4)
    checkpointed = {**RUN["model"], "gradient_checkpointing": True}
    assert needed(model=checkpointed)["activations"] < plain["activations"]
    assert "reference" not in plain
    assert needed(algorithm={"kl": {"coef": 0.1}})["reference"] == plain["weights"]
    assert "reference" not in needed(algorithm={"kl": {"coef": 0.0}})
    ahead = needed(rollout={**RUN["rollout"], "staleness": 1})
    assert ahead["engine's weights"] == plain["weights"] and ahead["keys and values"] > 0


def test_the_dry_run_says_what_does_not_fit_and_which_keys_to_change(monkeypatch):
    plans = stage_plans(Config(**RUN))
    assert "does not fit" not in "\n".join(memory_lines(plans))
    monkeypatch.setattr(planner, "device_memory", lambda config: 2**29)
    said = "\n".join(memory_lines(plans))
    assert "does not fit: 1.1 GiB of 0.5 GiB" in said
    assert "activations: optim.micro_batch_tokens" in said


def test_a_model_that_is_nowhere_gives_no_estimate_and_a_reason(tmp_path):
    plans = stage_plans(Config(**{**RUN, "model": {"path": str(tmp_path), "device": "cpu"}}))
    (line,) = memory_lines(plans)
    assert line.startswith("memory: no estimate")


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
        model_of(activation_offload=True)


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
    with pytest.raises(ConfigError, match=r"pip install 'rlvr\[bitsandbytes\]'"):
        adamw_8bit([torch.nn.Parameter(torch.zeros(2, 2))])


def test_the_estimate_counts_a_reference_where_the_stage_keeps_one(make_trainer):
    """For every loss and every further term."""
    from rlvr import registry
    from rlvr.losses.reference import compares_with_reference

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
        trainer = make_trainer({"algorithm": algorithm}, f"run-{number}")
        said = compares_with_reference(trainer.config.algorithm)
        assert said == trainer.stages[0].keeps_reference == (trainer.stages[0].reference is not None), algorithm
        kept[str(algorithm)] = said
        trainer.close()
    assert sum(kept.values()) == 8  # copg, dpo, ipo, kto, outcome_classifier, and the three places of a penalty
