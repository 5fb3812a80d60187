"""Frozen models in the memory plan: counted as they lie, on the device that trains."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlvr.config import Config, FrozenModelConfig
from rlvr.planner import Devices, plan_for
from rlvr.planner.frozen_memory import frozen_memory
from rlvr.planner.planner import Planner

GIB = 1 << 30
CPU = Devices(1, 64 * GIB, on_gpu=False)
GPU = Devices(2, 64 * GIB)


def size(folder, kind) -> int:
    model = kind.from_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def counted(folder, devices=CPU, ranks=1, **more):
    return frozen_memory({"rm": FrozenModelConfig(path=str(folder), **more)}, devices, ranks)


@pytest.mark.parametrize("family", ["qwen3", "bert", "roberta"])
def test_weights_are_those_of_the_model(make_folder, family):
    folder = make_folder(family)
    (weights,) = counted(folder).weights.values()
    # A head of one output and BERT's pooler are all that the plan and the classifier differ in.
    assert weights == pytest.approx(4 * size(folder, AutoModelForSequenceClassification), rel=0.1)
    (half,) = counted(folder, GPU, 2).weights.values()
    assert half == weights / 2 and counted(folder, GPU, 2, dtype="float32").weights == counted(folder).weights


def test_the_head_of_a_language_model_counts_where_it_is_its_own(make_folder):
    tied = make_folder("qwen3", "causal", tie_word_embeddings=True)
    apart = make_folder("qwen3", "causal", tie_word_embeddings=False)
    for folder in (tied, apart):
        assert sum(counted(folder).weights.values()) == 4 * size(folder, AutoModelForCausalLM)
    assert sum(counted(apart).weights.values()) > sum(counted(tied).weights.values())


def test_models_elsewhere_count_nothing(make_folder):
    folder = make_folder("bert")
    nothing = frozen_memory({}, CPU, 1)
    assert counted(folder, GPU, 2, device="cpu") == nothing
    assert counted(folder, GPU, 2, device="cuda:2") == nothing
    assert counted(folder, CPU, device="cuda") == nothing
    assert counted(folder, GPU, 2, device="cuda:1") == counted(folder, GPU, 2)
    assert frozen_memory({"rm": FrozenModelConfig(url="http://localhost:8000")}, GPU, 2) == nothing


def test_every_phase_has_the_weights_and_sampling_a_pass(make_folder):
    def run(**models):
        return Config(
            run={"steps": 1},
            model={"scratch": {}, "device": "cpu"},
            data={"train": {"name": "arithmetic", "count": 20}, "max_prompt_tokens": 96},
            rollout={"max_new_tokens": 16, "prompts_per_step": 2, "group_size": 4},
            models=models,
        )

    folder = make_folder("bert")
    one = {"path": str(folder), "device": "cpu"}
    planner = Planner(CPU, 1)
    (before,), (after,) = (planner.plans(planner.stages(config)) for config in (run(), run(rm=one)))
    weights = sum(counted(folder).weights.values())
    for old, new in zip(before.phases, after.phases, strict=True):
        more = new.total - old.total - weights
        scoring = sum(counted(folder).scoring.values())
        assert more == pytest.approx(scoring if new.name == "sampling" else 0, abs=1)
    # A smaller bound makes a smaller pass.
    small = counted(folder, batch_tokens=128).scoring["frozen models' passes"]
    assert small == counted(folder).scoring["frozen models' passes"] / 128
    # A model that does not fit beside the policy is refused with the rest.
    too_small = plan_for(run(rm=one), Devices(1, after.worst.total - weights / 2, on_gpu=False), 1)
    assert too_small.problem is not None
