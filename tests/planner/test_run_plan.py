"""What `auto` takes, what refuses a run and what it names, and devices that are not here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from rlvr.config import Config, LoraConfig
from rlvr.config.config_loading import load_config
from rlvr.errors import ConfigError
from rlvr.planner import Devices, Planner, parse_devices, plan_for
from rlvr.planner import planned_devices as devices_module
from rlvr.planner.meta_model import shipped_sizes
from rlvr.planner.planner import substituted
from rlvr.train import main

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
MODEL = {"scratch": {"hidden_size": 128, "layers": 4, "intermediate_size": 512, "context": 4096}, "device": "cpu"}
RUN = {
    "run": {"steps": 1},
    "model": MODEL,
    "data": {"train": {"name": "arithmetic", "count": 20}, "max_prompt_tokens": 96},
    "rollout": {"max_new_tokens": 928, "prompts_per_step": 16, "group_size": 4},
}
NOT_CHOSEN = {"optim": {"micro_batch_tokens": 65536}, "model": {**MODEL, "gradient_checkpointing": False}}


def config_of(**changes) -> Config:
    return Config(**{**RUN, **changes})


def chosen(config: Config, memory: float, on_gpu: bool = False, ranks: int = 1):
    result = plan_for(config, Devices(ranks, memory, on_gpu), ranks).config
    return result.model.gradient_checkpointing, result.optim.micro_batch_tokens


def test_a_cpu_takes_what_it_took_before_auto_where_that_fits():
    assert chosen(config_of(), 64 * GIB) == (False, None)


@pytest.mark.slow
def test_with_less_memory_micro_batches_are_smaller_and_then_activations_are_recomputed():
    config = config_of()
    least = 1024  # the longest sequence
    result = {memory: chosen(config, memory * GIB / 32) for memory in range(22, 150, 4)}
    fitting = [result[memory] for memory in sorted(result)]
    on = [checkpointing for checkpointing, _ in fitting]
    assert on == sorted(on, reverse=True) and set(on) == {True, False}  # only with the least memory
    tokens = [number for checkpointing, number in fitting if not checkpointing]
    limited = [number for number in tokens if number is not None]
    assert limited == sorted(limited) and min(limited) >= least and len(set(limited)) > 2
    assert tokens[len(limited) :] == [None] * (len(tokens) - len(limited))
    # the next step of the grid would not leave the margin
    memory = next(m for m in sorted(result) if result[m][1] not in (None, least) and not result[m][0])
    planner = Planner(Devices(1, memory * GIB / 32, on_gpu=False), 1)
    for more, fits in ((0, True), (512, False)):
        one = substituted(config, False, result[memory][1] + more)
        assert planner.fits(planner.stages(one)) == fits


@pytest.mark.gate
def test_a_gpu_is_kept_busy():
    """A GPU recomputes activations rather than taking micro-batches of few tokens, and takes no more than are of
    use."""
    large = {
        "model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16"},
        "rollout": {**RUN["rollout"], "prompts_per_step": 64},
    }
    config = config_of(**large)
    checkpointing, tokens = chosen(config, 24e9, on_gpu=True)
    assert checkpointing is True and 8192 < tokens <= 65536
    assert 8192 < chosen(config, 80e9, on_gpu=True)[1] <= 65536
    small = config_of(**{**large, "rollout": {**RUN["rollout"], "prompts_per_step": 4, "group_size": 2}})
    assert chosen(small, 200e9, on_gpu=True) == (False, None)


@pytest.mark.slow
def test_a_phase_without_micro_batches_does_not_make_them_small():
    """vLLM's share and the weights leave less than the margin in the publish, whatever the micro-batches are."""
    tree = {
        "model": {"path": "Qwen/Qwen2.5-1.5B", "adapter": LoraConfig()},
        "rollout": {
            **RUN["rollout"],
            "prompts_per_step": 64,
            "engine": {"name": "vllm", "gpu_memory_utilization": 0.65},
        },
    }
    devices = Devices(1, 24e9)
    planner = Planner(devices)
    result = plan_for(config_of(**tree), devices)
    (plan,) = planner.plans(planner.stages(result.config))
    publish, update = (next(phase for phase in plan.phases if phase.name == name) for name in ("publish", "update"))
    assert 0 < publish.left < planner.margin * devices.memory <= update.left
    assert result.problem is None
    assert plan.tokens > 8192


def test_what_is_chosen_is_written_in_every_stage_and_what_was_set_stays():
    stages = [
        {"kind": "sft", "steps": 1, "optim": {"micro_batch_size": 4}},
        {"kind": "grpo", "steps": 1, "optim": {"micro_batch_tokens": "auto"}},
        {"kind": "grpo", "steps": 1, "optim": {"micro_batch_tokens": 2048}},
        {"kind": "grpo", "steps": 1},
    ]
    config = substituted(config_of(stages=stages), True, 4096)
    again = load_config(yaml.safe_load(yaml.safe_dump(config.dump())))
    assert again == config
    planner = Planner(Devices(1, 64 * GIB, on_gpu=False), 1)
    optims = [stage.config.optim for stage in planner.stages(again)]
    assert [optim.micro_batch_tokens for optim in optims] == [None, 4096, 2048, 4096]
    assert optims[0].micro_batch_size == 4
    assert again.model.gradient_checkpointing is True
    unchanged = config_of(**NOT_CHOSEN)
    assert substituted(unchanged, True, 1) == unchanged


@pytest.mark.gate
def test_a_refusal_names_the_largest_part_and_what_would_fit(monkeypatch):
    config = config_of(**NOT_CHOSEN)
    problem = plan_for(config, Devices(1, 3 * GIB, on_gpu=False), 1).problem
    assert problem is not None
    result = re.match(
        r"does not fit: stage 1 \(grpo\) needs ([\d.]+) GiB of 3.0 GiB in: update, where the largest part is "
        r"activations with [\d.]+ GiB",
        problem,
    )
    assert result and float(result[1]) > 3
    ways = re.findall(r"\((\d)\) (.*?) \(([\d.]+) (GiB|MiB)(, not enough by itself)?\)", problem)
    assert [way[0] for way in ways] == ["1", "2", "3"]
    assert ways[0][1] == "optim.micro_batch_tokens=auto"
    for _, text, _, _, too_little in ways:
        overrides = [word.replace("'", "") for word in re.findall(r"[\w.]+=(?:'[^']*'|\S+)", text)]
        changed = load_config({**RUN, **NOT_CHOSEN}, overrides)
        fits = plan_for(changed, Devices(1, 3 * GIB, on_gpu=False), 1).problem is None
        assert fits == (not too_little), text


@pytest.mark.slow
def test_fixes_for_gpus_that_are_too_few():
    """A model whose weights, gradients and moments fill no single GPU is trained with them shared out."""
    tree = {
        "model": {"path": "Qwen/Qwen2.5-7B"},
        "rollout": {**RUN["rollout"], "engine": "vllm"},
    }
    problem = plan_for(config_of(**tree), Devices(8, 80e9)).problem
    assert "the largest part is optimizer" in problem
    assert "(1) distributed.backend=deepspeed distributed.zero_stage=2" in problem
    alone = plan_for(config_of(**tree), Devices(1, 80e9)).problem
    assert "model.adapter" in alone
    adapted = {**tree, "model": {"path": "Qwen/Qwen2.5-7B", "adapter": LoraConfig()}}
    assert plan_for(config_of(**adapted), Devices(1, 80e9)).problem is None


@pytest.mark.slow
def test_what_a_refusal_names_makes_the_run_fit():
    """vLLM's share of a small GPU holds no 7B: what does not touch the share is not named."""
    model = {"path": "Qwen/Qwen2.5-7B", "adapter": {"r": 16}, "quantization": "nf4"}
    tree = {**RUN, "model": model, "rollout": {**RUN["rollout"], "max_new_tokens": 3000, "engine": "vllm"}}
    problem = plan_for(Config(**tree), Devices(1, 24e9)).problem
    assert "vLLM's share" in problem and "offload_during_rollout" not in problem and "adamw_8bit" not in problem
    ways = re.findall(r"\(\d\) (.*?) \([\d.]+ (?:GiB|MiB)\)", problem)
    assert len(ways) == 3 and re.fullmatch(r"1 device of \d+ GB", ways[-1])
    assert plan_for(Config(**tree), parse_devices(f"1x{ways[-1].split()[-2]}GB")).problem is None
    for way in ways[:-1]:
        assert fits_after(tree, way, Devices(1, 24e9)), way


def fits_after(tree, way, devices, ranks=None) -> bool:
    """Whether a run fits with overrides pasted from a refusal, and on the devices that it names behind them."""
    overrides, _, other = way.partition(", on ")
    count = int(other.split()[0]) if other else devices.count
    return plan_for(load_config(tree, shlex.split(overrides)), Devices(count, devices.memory), ranks).problem is None


@pytest.mark.slow
def test_ranks_that_are_started_already_leave_none_of_their_gpus_to_a_server():
    zero = {"distributed": {"backend": "deepspeed", "zero_stage": 3}}
    rollout = {**RUN["rollout"], "engine": "vllm"}
    tree = {**RUN, **zero, "model": {"path": "Qwen/Qwen2.5-32B"}, "rollout": rollout}
    problem = plan_for(Config(**tree), Devices(8, 80e9), 8).problem
    ways = re.findall(r"\(\d\) (.*?) \([\d.]+ (?:GiB|MiB)\)", problem)
    assert "vllm-server" in problem and len(ways) == 3
    for way in ways[:-1]:
        assert fits_after(tree, way, Devices(8, 80e9), 8), way
        if "vllm-server" in way:
            assert re.search(r", on (9|10|12|16) devices$", way)


def test_ranks_with_devices_of_different_sizes_take_the_same(monkeypatch):
    """Rank 0 decides, for the smallest device."""
    from rlvr.planner.run_plan import plan_run

    class Rank:
        size = 2

        def __init__(self, rank, box):
            self.is_main = rank == 0
            self.box = box

        def gather(self, value, what):
            return [64 * GIB, 1.5 * GIB]

        def broadcast(self, value, what):
            self.box.setdefault(what, value)
            return self.box[what]

    monkeypatch.setattr(devices_module, "machine_memory", lambda: 64 * GIB)
    box = {}
    result = [plan_run(config_of(), Rank(rank, box)) for rank in (0, 1)]
    assert result[0].config == result[1].config
    one = result[0].config
    assert (one.model.gradient_checkpointing, one.optim.micro_batch_tokens) == chosen(config_of(), 1.5 * GIB, ranks=2)
    assert one.optim.micro_batch_tokens is not None


def test_the_other_ranks_are_told_that_the_plan_of_rank_0_failed(monkeypatch):
    from rlvr.planner import run_plan

    class Rank:
        size = 2
        is_main = True

        def __init__(self):
            self.failures = []

        def gather(self, value, what):
            return [value, value]

        def broadcast(self, value, what):
            raise AssertionError("rank 0 has nothing to send")

        def fail(self, error):
            self.failures.append(error)

    def broken(*arguments):
        raise KeyError("no such layer")

    world = Rank()
    monkeypatch.setattr(run_plan, "refusal", broken)
    with pytest.raises(KeyError, match="no such layer") as raised:
        run_plan.plan_run(config_of(), world)
    assert world.failures == [raised.value]


@pytest.mark.parametrize(
    ("written", "count", "memory"),
    [("8x80GB", 8, 80e9), ("1x24GB", 1, 24e9), ("16X80gb", 16, 80e9), (" 4 x 79.2GiB", 4, 79.2 * GIB)],
)
def test_devices_as_they_are_written(written, count, memory):
    assert parse_devices(written) == Devices(count, pytest.approx(memory))


@pytest.mark.parametrize(
    "written",
    [
        "8",
        "80GB",
        "8x80",
        "8x80TB",
        "x80GB",
        "-1x80GB",
        "0x80GB",
        "1x0GB",
        "8*80GB",
        "",
        f"{'9' * 5000}x80GB",
        f"1x{'9' * 320}GB",
    ],
)
def test_devices_that_are_no_devices_get_one_error(written):
    with pytest.raises(ConfigError) as result:
        parse_devices(written)
    assert "8x80GB" in str(result.value)
    assert "\n" not in str(result.value)


def test_a_dry_run_plans_for_gpus_that_are_not_here(capsys, monkeypatch):
    """Without a network and without the model's files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = str(ROOT / "configs/gsm8k-qwen2.5-0.5b.yaml")
    assert main(["--config", config, "--dry-run", "--devices", "1x24GB"]) == 0
    printed = capsys.readouterr().out
    assert "on 1 GPU of 22.4 GiB" in printed
    assert "does not fit" not in printed
    assert "no plan" not in printed
    assert main(["--config", config, "--dry-run", "--devices", "1x24TB"]) == 2
    assert "8x80GB" in capsys.readouterr().err
    assert main(["--config", config, "--devices", "1x24GB"]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_no_gpu_refuses_no_plan(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    config = str(ROOT / "configs/quickstart.yaml")
    assert main(["--config", config, "--dry-run", "model.device=cuda"]) == 0
    assert "give --devices" in capsys.readouterr().out


def test_every_model_of_the_shipped_configurations_has_its_sizes_with_the_library():
    files = [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("src/rlvr/recipes/**/*.yaml")]
    named = {yaml.safe_load(path.read_text()).get("model", {}).get("path") for path in files} - {None}
    assert len(named) > 15
    assert named - set(shipped_sizes()) == {
        "Qwen/Qwen3-4B-Instruct-2507",
        "RLHFlow/LLaMA3-SFT-v2",
        "huggyllama/llama-7b",
        "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B",
    }  # not confirmed


def test_a_model_that_is_nowhere_gives_no_plan_and_a_reason(tmp_path):
    result = plan_for(config_of(model={"path": str(tmp_path), "device": "cpu"}), Devices(1, GIB, on_gpu=False), 1)
    assert result.lines[0].startswith("memory: no plan")
    assert result.config.optim.micro_batch_tokens is None
    assert result.config.model.gradient_checkpointing is False
