"""What a plan counts: sizes by hand for every backend and engine, and models and a run that are really there."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from rlvr.config import Config, LoraConfig, ModelConfig, ScratchConfig
from rlvr.config.stage_plan import stage_plans
from rlvr.planner import Devices, Plan, Planner, Shape, own_devices, plan_for, plan_stage, shape_of
from rlvr.planner.micro_batch import way_of
from rlvr.planner.trainer_memory import TrainerMemory
from rlvr.policy import load_policy
from rlvr.policy.adapters import add_adapter
from rlvr.policy.loading import given_policy
from rlvr.policy.scratch import build_tokenizer

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
MIB = 1 << 20
GIB = 1 << 30


def model_of(**options) -> ModelConfig:
    return ModelConfig(scratch=ScratchConfig(**SCRATCH), device="cpu", **options)


def plan_on_cpu(**changes) -> Plan:
    config = Config(**{**RUN, **changes})
    (stage,) = stage_plans(config)
    return plan_stage(shape_of(config.model), stage, own_devices(config.model), 1)


def parts(plan: Plan, phase: str) -> dict[str, float]:
    (result,) = [one.parts for one in plan.phases if one.name == phase]
    return result


# models and runs that are there


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_weights_are_counted_as_a_loaded_model_has_them(adapter):
    config = model_of(adapter=adapter)
    model = load_policy(config).model
    shape = shape_of(config)
    assert shape.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert shape.largest == max(p.numel() for p in model.parameters())
    given = shape_of(model_of(), model)
    assert (given.weights, given.trained) == (shape.weights, shape.trained)


def kept_per_token(policy) -> float:
    """Bytes that a real forward pass of 4 rows of 64 tokens keeps for the backward pass, beside the weights."""
    own = {p.data_ptr() for p in policy.model.parameters()}
    kept = {}
    ids = torch.arange(256).reshape(4, 64) % 90

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.hidden_states(ids, torch.arange(64).expand(4, -1))
    return sum(storage.nbytes() for storage in kept.values()) / 256


def trained_part(kind: str):
    """A loaded model, and the options that its policy is made with."""
    model = load_policy(model_of()).model
    if kind == "an adapter is put on it":
        return model, {"adapter": {"r": 4}}
    if kind == "a peft model":
        return add_adapter(model, LoraConfig(r=4), 0), {}
    if kind == "the last layer trains":
        model.requires_grad_(False)
        model.base_model.layers[-1].requires_grad_(True)
    return model, {}


@pytest.mark.parametrize("kind", ["an adapter is put on it", "a peft model", "the last layer trains", "all trains"])
def test_a_model_that_was_loaded_already_is_planned_as_it_trains(kind):
    model, options = trained_part(kind)
    config = model_of(**options)
    shape = shape_of(config, model)
    planned = shape.decoder.passes(way_of(config))
    policy = given_policy(model, build_tokenizer(config.scratch), config)
    weights = list(policy.model.parameters())
    assert shape.trained == sum(p.numel() for p in weights if p.requires_grad)
    assert shape.weights == sum(p.nbytes for p in weights)
    assert shape.parameters == sum(p.numel() for p in weights)
    assert planned.kept.per_token == pytest.approx(kept_per_token(policy), rel=0.1)
    assert shape.head_trained == (64 * shape.vocabulary if kind == "all trains" else 0)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", pytest.param("gemma2", marks=pytest.mark.slow), "mistral"])
def test_activations_are_what_a_real_forward_pass_keeps(architecture):
    config = ModelConfig(scratch=ScratchConfig(**SCRATCH, architecture=architecture), device="cpu")
    measured = kept_per_token(load_policy(config))
    shape = shape_of(config)
    kept = shape.decoder.passes(way_of(config)).kept.per_token
    assert kept + 64 * shape.scores == pytest.approx(measured, rel=0.1)
    # gemma2 is the one with a soft-cap, which is computed by eager attention
    assert (shape.scores > 0) == (architecture == "gemma2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"scratch": BIG, "device": "cpu", "gradient_checkpointing": True}},
        {"model": {"scratch": BIG, "device": "cpu", "dtype": "bfloat16"}},
        {"optim": {"micro_batch_size": 4}},
    ],
)
def test_the_plan_is_near_the_peak_of_a_real_run(changes, tmp_path):
    tree = {**RUN, **changes, "run": {"steps": 2, "dir": str(tmp_path)}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    program = Path(__file__).with_name("measure_memory.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run.yaml")], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    measured = float(done.stdout.split()[-1]) * MIB
    planned = plan_on_cpu(**changes).needed
    assert 1 / 1.4 < planned / measured < 1.4, (planned / MIB, measured / MIB)


def test_each_setting_that_is_to_need_less_needs_less():
    plain = plan_on_cpu()
    update = parts(plain, "update")
    assert parts(plan_on_cpu(optim={"optimizer": "adamw_8bit"}), "update")["optimizer"] < update["optimizer"] / 3
    assert "optimizer" not in parts(plan_on_cpu(optim={"optimizer": "sgd"}), "update")
    fewer = parts(plan_on_cpu(optim={"micro_batch_size": 8}), "update")
    assert fewer["activations"] == pytest.approx(update["activations"] / 4)
    checkpointed = plan_on_cpu(model={**RUN["model"], "gradient_checkpointing": True})
    assert parts(checkpointed, "update")["activations"] < update["activations"]
    assert "reference" not in update
    compared = parts(plan_on_cpu(algorithm={"kl": {"coef": 0.1}}), "update")
    assert compared["reference"] == update["weights"]
    assert "reference" not in parts(plan_on_cpu(algorithm={"kl": {"coef": 0.0}}), "update")
    ahead = plan_on_cpu(rollout={**RUN["rollout"], "staleness": 1})
    assert parts(ahead, "update")["engine's weights"] == update["weights"]
    assert parts(ahead, "update")["keys and values"] > 0  # samples meanwhile
    # what waits in host memory is on a CPU in the same memory
    moved = plan_on_cpu(distributed={"offload_during_rollout": True})
    assert parts(moved, "sampling")["optimizer"] == update["optimizer"]


# by hand: 8 billion weights on 8 GPUs, so that a rank's part is one billion

BILLION = 10**9
EIGHT = Shape(
    parameters=8 * BILLION,
    trained=8 * BILLION,
    frozen=0,
    largest=600_000_000,
    largest_module=600_000_000,
    layers=32,
    hidden=4096,
    vocabulary=128_000,
    context=8192,
    decoder=None,  # no pass is planned of it
    head_trained=0,
    tied=False,
    queries=4096,
    keys=1024,
    scores=0,
    keys_and_values=131_072,
)
PLAIN = TrainerMemory(
    shape=EIGHT,
    ranks=8,
    on_gpu=True,
    bfloat16=True,
    stage=0,
    offload="none",
    offload_during_rollout=False,
    frees_gradients=True,
    state=8.0,
    reference=False,
)
UNITS = ("weights", "float32 weights", "gradients", "optimizer", "reference")


def billions(memory: TrainerMemory, phase: str) -> dict[str, float]:
    """The parts in billions of bytes, but for buffers."""
    return {name: size / BILLION for name, size in memory.at(phase).items() if name in UNITS}


@pytest.mark.parametrize(
    ("changes", "update", "sampling"),
    [
        # every rank: float32 weights, their gradients, two moments
        ({}, (32, 0, 32, 64), (32, 0, 0, 64)),
        ({"offload_during_rollout": True}, (32, 0, 32, 0), (32, 0, 0, 0)),
        ({"frees_gradients": False}, (32, 0, 32, 64), (32, 0, 32, 64)),
        # ZeRO 1 in bfloat16: weights 2, an eighth of 4, float32 gradients of all and those in bfloat16, an eighth of 8
        ({"stage": 1}, (16, 4, 32 + 16, 8), (16, 4, 0, 8)),
        ({"stage": 1, "bfloat16": False}, (32, 4, 32, 8), (32, 4, 0, 8)),
        ({"stage": 1, "offload": "optimizer"}, (16, 0, 32, 0), (16, 0, 0, 0)),
        ({"stage": 2}, (16, 4, 4, 8), (16, 4, 0, 8)),
        ({"stage": 2, "offload_during_rollout": True}, (16, 0, 4, 0), (16, 0, 0, 0)),
        ({"stage": 2, "offload": "optimizer"}, (16, 0, 4, 0), (16, 0, 0, 0)),
        ({"stage": 2, "bfloat16": False}, (32, 4, 8, 8), (32, 4, 0, 8)),
        ({"stage": 3}, (2, 4, 4, 8), (2, 4, 0, 8)),
        ({"stage": 3, "bfloat16": False}, (4, 0, 4, 8), (4, 0, 0, 8)),
        ({"stage": 3, "offload": "optimizer"}, (2, 0, 0, 0), (2, 0, 0, 0)),
        ({"stage": 3, "offload": "parameters"}, (0, 0, 0, 0), (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_what_a_backend_keeps_on_each_of_eight_gpus(changes, update, sampling):
    memory = dataclasses.replace(PLAIN, **changes)
    for phase, expected in (("update", update), ("sampling", sampling)):
        result = billions(memory, phase)
        assert tuple(result.get(name, 0) for name in UNITS[:4]) == expected, phase
    with_reference = billions(dataclasses.replace(memory, reference=True), "scoring")
    # a reference is a copy of what is computed with
    assert with_reference.get("reference", 0) == result.get("weights", 0)


def test_what_was_moved_to_the_host_is_back_for_the_step_of_the_optimizer():
    moved = dataclasses.replace(PLAIN, stage=3, offload_during_rollout=True)
    step = billions(moved, "optimizer step")
    # ZeRO 3 copies the gradients of a billion weights of this rank for the step
    assert (step["float32 weights"], step["optimizer"], step["gradients"]) == (4, 8, 4 + 4)
    # the sum of the plain backend's gradients over ranks goes through a buffer of the largest
    assert PLAIN.at("optimizer step")["buffers"] == 4 * 600_000_000
    assert "buffers" not in dataclasses.replace(PLAIN, ranks=1).at("optimizer step")


def test_weights_that_a_pass_makes_for_itself():
    assert PLAIN.pass_weights("update") == {"weights in bfloat16": 16 * BILLION}
    assert dataclasses.replace(PLAIN, bfloat16=False).pass_weights("update") == {}
    assert dataclasses.replace(PLAIN, stage=2).pass_weights("update") == {}
    three = dataclasses.replace(PLAIN, stage=3)
    head = 128_000 * 4096
    # the largest is larger than what DeepSpeed may keep whole; the head is whole through a backward pass
    assert three.pass_weights("publish") == {"gathered weights": 2 * 600_000_000}
    assert three.pass_weights("update") == {"gathered weights": 2 * (600_000_000 + head)}


def test_a_users_file_of_deepspeed_sizes_the_buffers(tmp_path):
    def planned(zero_stage, **settings):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"zero_optimization": settings}))
        return dataclasses.replace(PLAIN, stage=zero_stage, deepspeed=str(path))

    bucket = 10**9  # above the largest weight
    for zero_stage, changes, width, count in (
        (2, {}, 2, 2),
        (2, {"bfloat16": False}, 4, 2),
        (1, {"bfloat16": False}, 4, 2),
        (1, {}, 2, 1),  # in bfloat16, bf16_optimizer.py has one
    ):
        one, both = (
            dataclasses.replace(planned(zero_stage, reduce_bucket_size=bucket, overlap_comm=overlaps), **changes)
            for overlaps in (False, True)
        )
        assert one.at("update")["buffers"] == width * bucket, (zero_stage, changes)
        assert both.at("update")["buffers"] == count * width * bucket, (zero_stage, changes)
        assert both.at("sampling").get("buffers") is None

    # ZeRO 3 ends a group with the weight that makes it large enough, and copies the gradients of one group at once
    part, largest = EIGHT.trained / 8, EIGHT.largest / 8
    for size, expected in ((10**8, 10**8 + largest), (0, largest), (10**12, part)):
        memory = planned(3, sub_group_size=size)
        assert memory.at("optimizer step")["gradients"] == 4 * part + 4 * expected


EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}


def test_zero_3_gathers_all_weights_of_a_module_at_once():
    """The experts of a layer are two tensors of one module."""
    experts = dataclasses.replace(EIGHT, largest_module=900_000_000)
    three = dataclasses.replace(PLAIN, shape=experts, stage=3)
    assert three.pass_weights("publish") == {"gathered weights": 2 * 900_000_000}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**EXPERTS))
    shape = shape_of(ModelConfig(path="experts", device="cpu"), model)
    assert (shape.largest, shape.largest_module) == (32 * 2 * 96 * 64, 32 * 3 * 96 * 64)


def test_an_adapter_on_experts_warns_of_nothing():
    """peft says of the rank of fused projections, which is the sum of both, that it is ignored."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(**EXPERTS))
        adapted = add_adapter(empty, LoraConfig(r=3), 0)
        given = shape_of(ModelConfig(path="experts", device="cpu"), adapted).decoder.given
        again = given.put_on(AutoModelForCausalLM.from_config(AutoConfig.for_model(**EXPERTS)))
    for model in (adapted, again):
        (inner,) = [
            p
            for n, p in model.named_parameters()
            if n.endswith("layers.0.mlp.experts.base_layer.lora_A.default.weight")
        ]
        assert inner.shape == (32 * 2 * 3, 64)


def test_a_checkpoint_copies_what_it_writes_to_memory_that_on_a_cpu_is_the_same():
    on_cpu = dataclasses.replace(PLAIN, on_gpu=False, ranks=1)
    copies = "checkpoint's copies"
    # float32 weights and two moments, which stay for the next one; on 8 ranks an eighth on each
    for phase in ("publish", "evaluation", "sampling", "scoring", "update", "optimizer step"):
        assert on_cpu.at(phase)[copies] == 12 * 8 * BILLION
        assert copies not in PLAIN.at(phase)
    assert dataclasses.replace(on_cpu, ranks=8).at("update")[copies] == 12 * BILLION
    assert dataclasses.replace(on_cpu, reference=True).at("update")[copies] == 16 * 8 * BILLION
    merged = dataclasses.replace(on_cpu, merges=True).at("update")[copies]
    assert merged == (12 + 4) * 8 * BILLION
    # the base under an adapter that is made from nothing is written at the start
    frozen = dataclasses.replace(EIGHT, trained=0, frozen=16 * BILLION)
    base = dataclasses.replace(on_cpu, shape=frozen, writes_base=True)
    assert sum(base.at("start").values()) == 2 * 16 * BILLION
    assert sum(dataclasses.replace(base, on_gpu=True).at("start").values()) == 16 * BILLION


@pytest.mark.parametrize(
    ("file", "offload"), [("zero2", "none"), ("zero2", "optimizer"), ("zero3", "none"), ("zero3-offload", "parameters")]
)
def test_the_shipped_files_of_deepspeed_are_planned(file, offload):
    stage = 2 if file == "zero2" else 3
    path = Path(__file__).parents[2] / "configs" / "deepspeed" / f"{file}.json"
    distributed = {"backend": "deepspeed", "zero_stage": stage, "offload": offload, "deepspeed": str(path)}
    config = Config(**{**RUN, "model": {"path": "Qwen/Qwen2.5-0.5B"}, "distributed": distributed})
    plan = plan_for(config, Devices(8, 80e9), 8)
    assert plan.problem is None and any("update:" in line for line in plan.lines)


def test_an_adapter_trains_little_and_its_base_is_frozen():
    frozen = Shape(**{**vars(EIGHT), "trained": 40_000_000, "frozen": 16 * BILLION})
    memory = dataclasses.replace(PLAIN, shape=frozen, reference=True)
    assert memory.at("update") == {
        "weights": 16 * BILLION + 160_000_000,
        "gradients": 160_000_000,
        "optimizer": 320_000_000,
        "reference": 160_000_000,
    }
    # ZeRO 3 shares out the frozen weights too
    assert dataclasses.replace(memory, stage=3).at("update")["weights"] == (16 * BILLION + 80_000_000) / 8


# engines


ON_GPU = {
    "model": {"path": "Qwen/Qwen2.5-7B"},
    "data": {"train": "arithmetic", "max_prompt_tokens": 1000},
    "rollout": {"max_new_tokens": 3000, "engine": "vllm"},
    "run": {"steps": 1},
    "distributed": {"backend": "deepspeed", "zero_stage": 3},
}


def planned(devices: Devices, **changes) -> Plan:
    tree = {**ON_GPU, **changes}
    planner = Planner(devices)
    stages = planner.resolved(planner.stages(Config(**tree)))
    (plan,) = planner.plans(stages)
    return plan


@pytest.mark.slow
def test_the_share_of_vllm_sleeps_outside_of_publish_and_sampling():
    eight = Devices(8, 80 * GIB)
    plan = planned(eight)
    share = 0.4 * 80 * GIB
    awake = {phase.name for phase in plan.phases if phase.parts.get("vLLM's share") == pytest.approx(share)}
    assert awake == {"start", "publish", "sampling"}
    # under ZeRO 3 the weights wait in host memory until the engine has started
    assert "weights as loaded" not in parts(plan, "start")
    (inside,) = [phase for phase in plan.phases if phase.name == "vLLM's share"]
    assert inside.available == pytest.approx(share)
    weights = 7_615_616_512
    assert inside.parts["weights"] == 2 * weights
    assert inside.parts["keys and values of one sequence"] == 4000 * 28 * 2 * 4 * 128 * 2
    kept = planned(eight, rollout={**ON_GPU["rollout"], "engine": {"name": "vllm", "sleep": False}})
    assert "vLLM's share" in parts(kept, "update")
    ahead = planned(eight, rollout={**ON_GPU["rollout"], "staleness": 1})
    assert "vLLM's share" in parts(ahead, "optimizer step")


def test_servers_take_devices_of_their_own():
    servers = {"name": "vllm-server", "servers": 2, "tensor_parallel_size": 2}
    plan = planned(Devices(8, 80 * GIB), rollout={**ON_GPU["rollout"], "engine": servers})
    assert plan.ranks == 4
    assert all("vLLM's share" not in phase.parts for phase in plan.phases)
    (inside,) = [phase for phase in plan.phases if phase.name == "vLLM's share"]
    assert inside.parts["weights"] == 2 * 7_615_616_512 / 2
    assert inside.available == pytest.approx(0.9 * 80 * GIB)
    split = planned(
        Devices(8, 80 * GIB), rollout={**ON_GPU["rollout"], "engine": {"name": "vllm", "tensor_parallel_size": 4}}
    )
    assert split.ranks == 5  # beside rank 0's


def test_vllm_in_fp8_has_a_byte_for_each_weight_of_a_linear_layer_and_each_cached_number():
    fp8 = {"name": "vllm", "quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    plan = planned(Devices(8, 80 * GIB), rollout={**ON_GPU["rollout"], "engine": fp8})
    (inside,) = [phase for phase in plan.phases if phase.name == "vLLM's share"]
    # Qwen2.5-7B: 28 layers of queries and output, keys and values, three matrices of the MLP
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert inside.parts["weights"] == 2 * 7_615_616_512 - linear
    assert inside.parts["keys and values of one sequence"] == 4000 * 28 * 2 * 4 * 128


@pytest.mark.alone
def test_the_bytes_are_those_of_deepspeed():
    """One rank on a CPU, between two optimizer steps and before the second."""
    pytest.importorskip("deepspeed")
    program = Path(__file__).with_name("measure_zero.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result) == 6
    apart = ("buffers", "checkpoint's copies")
    for name, measured in result.items():
        zero_stage, dtype = name.split()
        shape = shape_of(model_of(dtype=dtype))
        memory = dataclasses.replace(
            PLAIN,
            shape=shape,
            ranks=1,
            on_gpu=False,
            bfloat16=dtype == "bfloat16",
            stage=int(zero_stage),
            frees_gradients=False,
        )
        for phase, held in zip(("sampling", "update"), measured, strict=True):
            planned = sum(size for part, size in memory.at(phase).items() if part not in apart)
            if phase == "update" and name == "2 float32":
                planned -= 4 * shape.trained  # the gradients of a pass, which are gone after it
            assert held == pytest.approx(planned, rel=0.02), (name, phase)
