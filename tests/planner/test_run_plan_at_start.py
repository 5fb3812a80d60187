"""A run's memory plan at its start: what `auto` becomes in the run folder, after a resume, and a run that cannot
fit."""

from __future__ import annotations

import json

import pytest
import yaml

from rlvr.errors import CheckpointError, ConfigError
from rlvr.planner import planned_devices as devices
from rlvr.planner.planner import substituted
from rlvr.policy import load_policy
from rlvr.rollout.vllm import installed
from rlvr.run import policy_training


def recorded(trainer) -> tuple:
    tree = yaml.safe_load((trainer.folder.path / "config.yaml").read_text())
    return tree["model"]["gradient_checkpointing"], tree["optim"]["micro_batch_tokens"]


def recomputes(trainer) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in trainer.policy.model.modules())


@pytest.mark.gate
def test_a_run_that_cannot_fit_is_refused_before_its_model_is_loaded(make_trainer, monkeypatch):
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**29)
    with monkeypatch.context() as context:
        context.setattr(policy_training, "load_policy", lambda *_: pytest.fail("a model was loaded"))
        with pytest.raises(ConfigError, match=r"the run does not fit: stage 1 .* run.check_memory=false"):
            make_trainer({})
    trainer = make_trainer({"run": {"check_memory": False}})
    assert "does not fit" in trainer.resolved.memory_plan.problem


def test_a_model_that_is_given_is_planned_for(make_trainer):
    loaded = load_policy(make_trainer({}, "other").config.model)
    trainer = make_trainer({}, model=loaded.model, tokenizer=loaded.tokenizer)
    assert "memory: at most about" in trainer.resolved.memory_plan.brief
    assert trainer.config.optim.micro_batch_tokens is None


def test_what_was_chosen_is_recorded_and_kept_on_resume(make_trainer, monkeypatch):
    """A machine with more memory would choose otherwise, and the run goes on as it was."""
    # so little that nothing fits, for which `auto` takes what needs least
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**29)
    unchecked = {"run": {"steps": 2, "check_memory": False}}
    trainer = make_trainer(unchecked)
    trainer.train(1)
    trainer.close()
    longest = recorded(trainer)[1]
    assert recorded(trainer) == (True, longest) and longest > 0
    assert recomputes(trainer)
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**36)
    again = make_trainer(unchecked)
    assert again.config.optim.micro_batch_tokens is None and not recomputes(again)
    again.train(resume="auto")
    assert len(again.metrics) == 2
    assert recorded(again) == (True, longest)
    assert again.stages[0].config.optim.micro_batch_tokens == longest
    assert recomputes(again)
    # what is printed is the plan of the values that were kept
    assert f"optim.micro_batch_tokens={longest}" in again.resolved.memory_plan.brief
    assert any(
        f"micro-batches of at most {longest} tokens, with gradient" in line for line in again.resolved.memory_plan.lines
    )
    # written out, a value is the user's, and another one is refused as before
    other = make_trainer({**unchecked, "optim": {"micro_batch_tokens": 3}})
    with pytest.raises(Exception, match=r"optim.micro_batch_tokens"):
        other.train(resume="auto")


def test_values_that_do_not_fit_any_more_are_chosen_again_and_said(make_trainer, monkeypatch, capsys):
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**36)
    tree = {"run": {"steps": 3}, "logging": {"console": "plain"}}
    first = make_trainer(tree)
    first.train(1)
    first.close()
    assert recorded(first) == (False, None)
    planner = first.resolved.memory_plan.planner
    least = substituted(first.resolved.memory_plan.written, True, 1)
    most = planner.plans(first.resolved.plans)[0].worst.total
    # memory that is too small for the values of the checkpoint, and holds the smallest ones
    between = (planner.plans(planner.stages(least))[0].worst.total + most) / 2
    monkeypatch.setattr(devices, "machine_memory", lambda: between)
    again = make_trainer(tree)
    capsys.readouterr()
    again.train(1, resume="auto")
    output = [line for line in capsys.readouterr().out.splitlines() if "checkpoint's values" in line]
    assert len(again.metrics) == 2
    checkpointing, tokens = recorded(again)
    assert checkpointing is True and tokens > 0 and recomputes(again)
    assert again.stages[0].config.optim.micro_batch_tokens == tokens
    assert len(output) == 1
    assert "rounding alone" in output[0]
    assert "model.gradient_checkpointing false -> true" in output[0]
    assert f"optim.micro_batch_tokens null -> {tokens}" in output[0]
    again.close()
    # the next start finds a checkpoint with the new values
    third = make_trainer(tree)
    third.train(resume="auto")
    assert recorded(third) == (True, tokens) and third.resolved.memory_plan.notice is None
    assert f"kept from the checkpoint: model.gradient_checkpointing=true, optim.micro_batch_tokens={tokens}" in (
        third.resolved.memory_plan.brief
    )
    # and on a machine where nothing fits, no model is loaded
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**20)
    with monkeypatch.context() as context:
        context.setattr(policy_training, "load_policy", lambda *_: pytest.fail("a model was loaded"))
        with pytest.raises(ConfigError, match="does not fit"):
            make_trainer(tree)


@pytest.mark.gate
def test_each_stage_keeps_its_own_values(make_trainer, monkeypatch):
    """On a machine of another size, where the plan chooses otherwise."""
    stages = [
        {"kind": "sft", "steps": 1, "optim": {"micro_batch_size": 2}},
        {"kind": "grpo", "steps": 1, "optim": {"micro_batch_tokens": "auto", "lr": 1e-3}},
        {"kind": "grpo", "steps": 1},
    ]
    tree = {"run": {"steps": None, "check_memory": False}, "stages": stages}
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**29)
    first = make_trainer(tree)
    first.train(1)
    first.close()
    longest = recorded(first)[1]
    assert longest > 0
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**36)
    again = make_trainer(tree)
    assert [stage.config.optim.micro_batch_tokens for stage in again.stages] == [None, None, None]
    again.train(resume="auto")
    assert len(again.metrics) == 3
    assert [stage.config.optim.micro_batch_tokens for stage in again.stages] == [None, longest, longest]
    written = yaml.safe_load((again.folder.path / "config.yaml").read_text())
    assert [stage.get("optim", {}).get("micro_batch_tokens") for stage in written["stages"]] == [None, longest, None]
    assert recorded(again) == (True, longest)
    again.close()
    # a stage that was written with a number keeps it when it is left to the plan
    stages[2]["optim"] = {"micro_batch_tokens": longest + 7}
    other = make_trainer(tree, "other")
    other.train(1)
    other.close()
    stages[2]["optim"] = {"micro_batch_tokens": "auto"}
    automatic = make_trainer(tree, "other")
    automatic.train(resume="auto")
    assert automatic.stages[2].config.optim.micro_batch_tokens == longest + 7
    assert automatic.stages[1].config.optim.micro_batch_tokens is None


def test_a_resumed_run_keeps_the_engine_of_its_checkpoint(make_trainer, monkeypatch):
    engine = {"name": "hf", "max_rows": 4}
    written = make_trainer({"run": {"steps": 2}, "rollout": {"engine": engine}})
    written.train(1)
    written.close()
    tree = {"run": {"steps": 2}, "rollout": {"engine": "auto"}}
    unaware = make_trainer(tree)
    assert unaware.config.rollout.engine.name == "hf"
    with pytest.raises(CheckpointError, match=r"made with rollout.engine .*max_rows.* auto takes hf: .* give `resume`"):
        unaware.train(resume="auto")
    unaware.close()
    again = make_trainer(tree, resume="auto")
    assert again.config.rollout.engine.written == engine
    again.train()
    assert len(again.metrics) == 2
    again.close()
    # one that is not possible here is refused before a model is loaded

    def missing():
        raise ConfigError("vLLM is not installed")

    state = again.folder.checkpoints / "step-2" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"config": {"rollout": {"engine": "vllm"}}}))
    monkeypatch.setattr(installed, "version", missing)
    monkeypatch.setattr(policy_training, "load_policy", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=r"not installed .*auto takes vllm: the checkpoint was made with it"):
        make_trainer(tree, resume="auto")
