"""A run's memory plan at its start: what `auto` becomes in the run folder, after a resume, and a run that cannot fit."""

from __future__ import annotations

import pytest
import yaml

from rlvr import trainer as trainer_module
from rlvr.errors import ConfigError
from rlvr.planner import devices
from rlvr.policy import load_policy


def recorded(trainer) -> tuple:
    tree = yaml.safe_load((trainer.folder.path / "config.yaml").read_text())
    return tree["model"]["gradient_checkpointing"], tree["optim"]["micro_batch_tokens"]


def recomputes(trainer) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in trainer.policy.model.modules())


def test_a_run_that_cannot_fit_is_refused_before_its_model_is_loaded(make_trainer, monkeypatch):
    monkeypatch.setattr(devices, "machine_memory", lambda: 2**29)
    with monkeypatch.context() as context:
        context.setattr(trainer_module, "load_policy", lambda *_: pytest.fail("a model was loaded"))
        with pytest.raises(ConfigError, match=r"the run does not fit: stage 1 .* run.check_memory=false"):
            make_trainer({})
    trainer = make_trainer({"run": {"check_memory": False}})
    assert "does not fit" in trainer.memory_plan.problem


def test_a_model_that_is_given_is_planned_for(make_trainer):
    loaded = load_policy(make_trainer({}, "other").config.model)
    trainer = make_trainer({}, model=loaded.model, tokenizer=loaded.tokenizer)
    assert "memory: at most about" in trainer.memory_plan.brief
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
    # written out, a value is the user's, and another one is refused as before
    other = make_trainer({**unchecked, "optim": {"micro_batch_tokens": 3}})
    with pytest.raises(Exception, match=r"optim.micro_batch_tokens"):
        other.train(resume="auto")
