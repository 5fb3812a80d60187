"""Lengths in a plan: of evaluations, of sliding windows, of prompts that a group has in common, and what vLLM works
with."""

from __future__ import annotations

import dataclasses

import pytest

from rlvr import GRPOTrainer
from rlvr.config import Config, ModelConfig
from rlvr.evaluation.evaluation_loop import BLOCK
from rlvr.planner import Devices, Plan, Planner, Shape, shape_of
from rlvr.planner.engine_memory import WORKSPACE, cached_bytes
from rlvr.planner.micro_batch import layer_bytes
from rlvr.planner.plan import Passes
from rlvr.records import Task

GIB = 1 << 30
RUN = {
    "model": {"path": "Qwen/Qwen2.5-0.5B", "gradient_checkpointing": True},
    "data": {"train": "arithmetic", "max_prompt_tokens": 1000},
    "rollout": {"max_new_tokens": 3000, "prompts_per_step": 8, "group_size": 4, "engine": "hf"},
    "optim": {"micro_batch_tokens": 16384},
    "run": {"steps": 1},
}


SHAPES: dict[str, Shape] = {}
"""Shared by the plans, since to count takes seconds."""


def planned(devices: Devices | None = None, eval_tasks=None, **changes) -> Plan:
    tree = RUN | changes
    planner = Planner(devices or Devices(1, 80 * GIB), eval_tasks=eval_tasks, shapes=SHAPES)
    (plan,) = planner.plans(planner.resolved(planner.stages(Config(**tree))))
    return plan


def parts(plan: Plan, phase: str) -> dict[str, float]:
    (result,) = [one.parts for one in plan.phases if one.name == phase]
    return result


# evaluations


def test_an_evaluation_has_its_own_phase_with_its_lengths_and_rows():
    token = 24 * 2 * 2 * 64 * 2  # bytes of a token's keys and values
    assert "evaluation" not in {phase.name for phase in planned().phases}
    training = parts(planned(), "sampling")
    assert training["keys and values"] == 32 * (4000 + 64) * token
    held_out = {**RUN["data"], "eval": "held-out.jsonl"}
    plan = planned(data=held_out, evaluation={"max_new_tokens": 7000})
    # a block of an evaluation is more than the engine's 1024 rows
    assert parts(plan, "evaluation")["keys and values"] == 1024 * (8000 + 64) * token
    assert plan.worst.name == "evaluation"
    assert parts(plan, "sampling") == training
    engine = {**RUN["rollout"], "engine": {"name": "hf", "max_rows": 8}}
    few = parts(planned(data=held_out, evaluation={"max_new_tokens": 7000}, rollout=engine), "evaluation")
    assert few["keys and values"] == 8 * (8000 + 64) * token
    assert not any(
        phase.name == "evaluation"
        for phase in planned(data=held_out, evaluation={"at_start": False, "at_end": False}).phases
    )


@pytest.mark.parametrize(
    ("evaluation", "prompts", "responses"),
    [
        ({}, BLOCK, BLOCK),
        ({"limit": 100}, 100, 100),
        ({"limit": 100, "samples": 8}, 100, 800),
        ({"limit": 1000, "samples": 16}, 256, 4096),
        ({"data": {"name": "arithmetic", "count": 20}}, 20, 20),
        ({"data": [{"name": "arithmetic", "count": 20}, {"name": "arithmetic", "count": 30, "digits": 4}]}, 50, 50),
        ({"data": [{"name": "arithmetic", "count": 20}, "more.jsonl"]}, BLOCK, BLOCK),
    ],
    ids=str,
)
def test_responses_that_an_evaluation_asks_for_at_once(evaluation, prompts, responses):
    evaluated = planned(data={**RUN["data"], "eval": "held-out.jsonl"}, evaluation=evaluation).evaluated
    assert (evaluated.prompts, evaluated.responses) == (prompts, responses)
    assert evaluated.length == 4000


def test_tasks_that_were_given_in_python_are_evaluated_on(tmp_path):
    tasks = [Task(str(a), f"{a} + {a} =", str(2 * a)) for a in range(5)]
    assert planned(eval_tasks=tasks).evaluated.responses == 5
    config = Config(
        model={
            "scratch": {"hidden_size": 16, "layers": 1, "intermediate_size": 32, "context": 64},
            "device": "cpu",
        },
        rollout={"max_new_tokens": 4},
        run={"steps": 1, "dir": str(tmp_path)},
        logging={"console": "off"},
    )
    with GRPOTrainer(config=config, tasks=tasks, eval_tasks=tasks, verifier="exact") as trainer:
        (line,) = [line for line in trainer.resolved.memory_plan.lines if "evaluations" in line]
    assert "up to 5 responses" in line


def test_vllm_has_room_for_the_longest_sequence_of_an_evaluation():
    rollout = {**RUN["rollout"], "engine": "vllm"}
    short = parts(planned(rollout=rollout), "vLLM's share")
    data = {**RUN["data"], "eval": "held-out.jsonl"}
    long = parts(planned(rollout=rollout, data=data, evaluation={"max_new_tokens": 7000}), "vLLM's share")
    assert long["keys and values of one sequence"] == 2 * short["keys and values of one sequence"]
    most = {**RUN["rollout"], "engine": {"name": "vllm", "max_model_len": 12000}}
    assert parts(planned(rollout=most), "vLLM's share")["keys and values of one sequence"] == pytest.approx(
        3 * short["keys and values of one sequence"]
    )


# sliding windows


def test_layers_with_a_sliding_window_keep_less_in_vllm():
    mistral = {"architecture": "mistral", "hidden_size": 64, "layers": 4, "intermediate_size": 128, "context": 65536}
    shape = shape_of(ModelConfig(scratch=mistral, device="cpu"))
    assert (shape.window, shape.windowed) == (4096, 4)
    gemma = shape_of(ModelConfig(scratch={**mistral, "architecture": "gemma2"}, device="cpu"))
    assert gemma.windowed == 2  # every second layer
    none = shape_of(ModelConfig(scratch={**mistral, "architecture": "llama"}, device="cpu"))
    assert (none.window, none.windowed) == (0, 0)
    token = shape.keys_and_values / 4
    assert cached_bytes(none, 50_000, 1000) == 50_000 * none.keys_and_values
    assert cached_bytes(shape, 3000, 1000) == 4 * 3000 * token
    assert cached_bytes(shape, 50_000, 1000) == 4 * (4095 + 1000 + 16) * token
    half = dataclasses.replace(shape, windowed=2)
    assert cached_bytes(half, 50_000, 1000) == (2 * 50_000 + 2 * (4095 + 1000 + 16)) * token


# prompts in common


@pytest.mark.parametrize(
    ("optim", "apart", "shared"),
    [
        # 16,384 tokens, a quarter of them trained; or 2 prompts with 4 responses each
        ({"micro_batch_tokens": 16384}, (16384, 4096), (2 * 3000 + 8 * 1000, 8000)),
        # 3 prompts and 11 responses
        ({"micro_batch_tokens": 20000}, (20000, 5000), (3 * 3000 + 11 * 1000, 11000)),
        # a limit that no rollout has room in takes one at a time
        ({"micro_batch_tokens": 2000}, (4000, 1000), (3000 + 1000, 1000)),
        ({"micro_batch_tokens": None}, (32 * 4000, 32000), (8 * 3000 + 32 * 1000, 32000)),
        ({"micro_batch_tokens": None, "micro_batch_size": 6}, (24000, 6000), (2 * 3000 + 6000, 6000)),
    ],
    ids=str,
)
def test_more_tokens_are_trained_where_a_group_computes_its_prompt_once(optim, apart, shared):
    """8 prompts of 3,000 tokens with 4 responses of 1,000 each."""
    tree = RUN | {
        "data": {**RUN["data"], "max_prompt_tokens": 3000},
        "rollout": {**RUN["rollout"], "max_new_tokens": 1000},
        "optim": optim,
    }
    planner = Planner(Devices(1, 80 * GIB), shapes=SHAPES)
    (stage,) = planner.stages(Config(**tree))
    passes = Passes(planner.shape(stage.config.model), stage.config, planner.devices, 1, True, trainer=None)
    assert passes.apart() == apart
    assert passes.shared() == shared


# vLLM's work


def test_what_vllm_works_with_follows_its_batch_and_the_vocabulary():
    rollout = {**RUN["rollout"], "engine": {"name": "vllm", "gpu_memory_utilization": 0.6}}
    shape = shape_of(ModelConfig(path="Qwen/Qwen2.5-0.5B", dtype="bfloat16", device="cpu"))
    config = ModelConfig(**RUN["model"], dtype="bfloat16", device="cpu")

    def work(memory, **options):
        engine = {**rollout["engine"], **options}
        plan = planned(Devices(1, memory), rollout={**rollout, "engine": engine})
        return parts(plan, "vLLM's share")["work"] - WORKSPACE

    def sampling(rows, tokens):
        return rows * 151_936 * (2 + 4 * 4) + tokens * 896 * 2

    # vLLM's own batches: 1,024 sequences and 8,192 tokens from 70 GiB on, else 256 and 2,048
    assert work(80 * GIB) == max(sampling(1024, 8192), layer_bytes(shape, config, 8192))
    assert work(80 * GIB) > 2.5 * GIB
    assert work(40e9) == max(sampling(256, 2048), layer_bytes(shape, config, 2048))
    assert work(80 * GIB, max_num_seqs=2048) == sampling(2048, 8192)
    assert work(80 * GIB, engine_args={"max_num_seqs": 2048}) == sampling(2048, 8192)
    assert work(80 * GIB, max_num_seqs=64, max_num_batched_tokens=65536) == layer_bytes(shape, config, 65536)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert work(80 * GIB, speculative_config=drafts) == sampling(4096, 8192)
