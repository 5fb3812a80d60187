"""Callbacks of a run: their events in order, a stop, an error of theirs, and their state over a resume."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path

import pytest

from rlvr import Callback, GRPOTrainer
from rlvr.errors import ConfigError, DataError, UserCodeError
from rlvr.monitor.console import Console
from rlvr.run.closing import show_closing
from rlvr.run.train_state import TrainState
from small_run import lines, task_rows

EVALUATED = {"evaluation": {"every": 2, "at_start": True}}


class Recorded(Callback):
    """Writes down its events."""

    def __init__(self):
        self.events = []
        self.count = 0

    def on_start(self, run):
        self.events.append(("start", run.step))

    def on_step(self, run, metrics):
        assert run.metrics[-1]["step"] == metrics["step"] == run.step
        self.count += 1
        self.events.append(("step", run.step))

    def on_evaluation(self, run, results):
        assert 0 <= results["eval/greedy"] <= 1
        self.events.append(("evaluation", run.step))

    def on_save(self, run, checkpoint):
        assert (checkpoint / "model" / "config.json").exists()
        self.events.append(("save", checkpoint.name))

    def on_end(self, run):
        assert run.path.is_dir()
        self.events.append(("end", run.step))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class StopsAt(Callback):
    def __init__(self, step, event="on_step"):
        self.step = step
        self.event = event

    def on_step(self, run, metrics):
        return self.event == "on_step" and run.step == self.step

    def on_evaluation(self, run, results):
        return self.event == "on_evaluation" and run.step == self.step


def test_events_come_in_order_and_the_state_survives_a_resume(make_trainer):
    over = {"run": {"steps": 4}, "checkpoint": {"every": 2, "background": False}, **EVALUATED}
    first = Recorded()
    trainer = make_trainer(over, callbacks=[first], eval_tasks=task_rows(3))
    trainer.train(3)
    assert [event for event in first.events if event[0] != "save"] == [
        ("start", 0),
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
        ("end", 3),
    ]
    assert [event for event in first.events if event[0] == "save"] == [("save", "step-2"), ("save", "step-3")]
    trainer.close()
    again = Recorded()
    with make_trainer(over, callbacks=[StopsAt(99), again], eval_tasks=task_rows(3)) as resumed:
        resumed.train(resume="auto")
    assert again.count == 4
    assert again.events[0] == ("start", 3)
    assert again.events[-1] == ("end", 4)


def test_an_evaluation_made_after_the_checkpoint_is_shown_after_a_resume(make_trainer):
    over = {"run": {"steps": 3}, "checkpoint": {"every": 2, "background": False}, **EVALUATED}
    trainer = make_trainer(over, eval_tasks=task_rows(3))
    trainer.train(2)
    trainer.close()
    seen = Recorded()
    resumed = make_trainer(over, callbacks=[seen], eval_tasks=task_rows(3))
    resumed.train(resume="auto")
    # The checkpoint of step 2 was written before the evaluation of that step.
    assert ("evaluation", 2) in seen.events
    assert [row["step"] for row in lines(resumed.path / "evaluations.jsonl")] == [0, 2, 3]


@pytest.mark.parametrize(("event", "step"), [("on_step", 1), ("on_evaluation", 2), ("on_evaluation", 0)])
def test_a_callback_stops_the_run_after_the_step_with_a_checkpoint(make_trainer, capsys, event, step):
    over = {"run": {"steps": 5}, "logging": {"console": "plain"}, **EVALUATED}
    trainer = make_trainer(over, callbacks=[StopsAt(step, event)], eval_tasks=task_rows(3))
    assert len(trainer.train()) == step
    shown = capsys.readouterr().out
    assert f"stopped after step {step} (the callback StopsAt asked for it)" in shown
    assert f"run folder: {trainer.path}" in shown
    if step:
        assert (trainer.path / "checkpoints" / f"step-{step}" / "model").is_dir()
    # The request was of that call alone: the next one goes on.
    assert len(trainer.train()) == 5


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_evaluation", "on_save", "on_end"])
def test_a_callback_that_raises_is_an_error_of_the_users_code(make_trainer, event):
    def broken(self, *arguments):
        raise KeyError("my mistake")

    callback = type("Broken", (Callback,), {event: broken})()
    over = {"run": {"steps": 2}, "checkpoint": {"every": 1, "background": False}, **EVALUATED}
    trainer = make_trainer(over, callbacks=[callback], eval_tasks=task_rows(3))
    with pytest.raises(UserCodeError) as raised:
        trainer.train()
    text = str(raised.value)
    assert text.startswith(f"{event} of the callback Broken raised")
    assert "in broken" in text and "KeyError: 'my mistake'" in text
    assert "callbacks.py" not in text.replace("test_callbacks.py", "")
    if event == "on_step":
        assert "Steps 1 to 1 are saved" in text
        # The step was whole: a resume goes on after it, with its line in metrics.jsonl.
        trainer.close()
        with make_trainer(over, eval_tasks=task_rows(3)) as resumed:
            resumed.train(resume="auto")
        assert [row["step"] for row in lines(resumed.path / "metrics.jsonl")] == [1, 2]


def test_what_is_no_callback_and_a_state_that_is_no_json_are_refused(make_trainer):
    with pytest.raises(ConfigError, match=r"the callback function is not an object of a subclass of rlvr\.Callback"):
        make_trainer(callbacks=[lambda run: None])
    with pytest.raises(ConfigError, match="the callback Recorded is not an object"):
        make_trainer(callbacks=[Recorded])
    for event, advice in {"on_evalution": "did you mean 'on_evaluation'", "on_log": "known: on_end"}.items():
        wrong = type("Wrong", (Callback,), {event: lambda self, run: None})
        with pytest.raises(ConfigError, match=f"the callback Wrong has {event}, which is no event; {advice}"):
            make_trainer(callbacks=[wrong()])
    bad = type("Bad", (Callback,), {"state_dict": lambda self: {"set": {1}}})()
    trainer = make_trainer(callbacks=[bad])
    with pytest.raises(ConfigError, match="state_dict of the callback Bad gives no JSON types"):
        trainer.train()


def test_a_checkpoint_without_callbacks_is_resumed(make_trainer):
    trainer = make_trainer({"run": {"steps": 2}})
    trainer.train(1)
    (state,) = (trainer.path / "checkpoints" / "step-1").glob("state*.json")
    assert json.loads(state.read_text())["callbacks"] == []
    trainer.close()
    seen = Recorded()
    make_trainer({"run": {"steps": 2}}, callbacks=[seen]).train(resume="auto")
    assert seen.count == 1


def test_the_end_of_a_run_prints_the_closing_lines_of_the_command(make_trainer, capsys):
    over = {"run": {"steps": 2}, "logging": {"console": "plain"}}
    trainer = make_trainer(over, eval_tasks=task_rows(3))
    with pytest.raises(ConfigError, match=r"there is no run in \S+ to report on yet: call train\(\) first"):
        trainer.report()
    trainer.train(1)
    assert "run folder: " + str(trainer.path) + " (" not in capsys.readouterr().out
    trainer.train()
    shown = capsys.readouterr().out
    assert "held-out tasks" in shown and "report: trainer.report()" in shown
    assert shown.splitlines()[-1].startswith("done: 2 steps, reward")
    page = trainer.report()
    assert page == trainer.path / "report.html"
    assert "<html" in page.read_text()
    show_closing(Console(), trainer.path, TrainState())
    assert f"report: {page} (open it in a browser)" in capsys.readouterr().out
    later = page.stat().st_mtime + 5
    os.utime(trainer.path / "metrics.jsonl", (later, later))
    show_closing(Console(), trainer.path, TrainState())
    assert f"report: trainer.report() ({page} is of an earlier step)" in capsys.readouterr().out


def test_epochs_are_steps_of_the_tasks(make_trainer, tmp_path):
    over = {"run": {"steps": None, "epochs": 1.5}, "rollout": {"prompts_per_step": 4}}
    trainer = make_trainer(over, callbacks=[])
    # 6 tasks, 4 in a step: 9 prompts are 2.25 steps, rounded up.
    assert trainer.resolved.steps == 3
    assert len(trainer.train()) == 3
    trainer.close()
    more = {**over, "run": {"steps": None, "epochs": 2.6}}
    with make_trainer(more) as resumed:
        assert len(resumed.train(resume="auto")) == 4
    with pytest.raises(ConfigError, match="`steps` and `epochs` exclude each other"):
        make_trainer({"run": {"steps": 3, "epochs": 1}}, name="both")
    stages = {"run": {"steps": None, "epochs": 1}, "stages": [{"kind": "grpo", "steps": 2}]}
    with pytest.raises(ConfigError, match=r"run\.epochs is for stages without `steps`"):
        make_trainer(stages, name="stages")
    stages["stages"].append({"kind": "grpo", "rollout": {"prompts_per_step": 3}})
    made = make_trainer(stages, name="stages")
    assert [(plan.steps, plan.before) for plan in made.resolved.plans] == [(2, 0), (2, 2)]


def test_a_user_error_leaves_the_trainer_without_frames_of_the_library(make_tree):
    with pytest.raises(DataError) as raised:
        GRPOTrainer(config=make_tree({"data": {"train": "missing.jsonl"}}))
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [Path(frame.filename).name for frame in frames] == ["test_callbacks.py", "errors.py"]
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_callbacks_that_are_no_list_are_refused_in_words(make_tree):
    with pytest.raises(ConfigError, match=r"callbacks is a list .*rlvr\.Callback, not Recorded"):
        GRPOTrainer(config=make_tree(), callbacks=Recorded())


@pytest.mark.parametrize("steps", [-1, 1.5, "2", True])
def test_a_number_of_steps_that_is_none_is_refused_before_the_run_begins(make_trainer, steps):
    with make_trainer() as trainer:
        with pytest.raises(ConfigError, match=rf"steps is {steps!r}: give the number of steps"):
            trainer.train(steps)
        assert not trainer.path.exists()


def test_a_run_that_has_begun_goes_on_from_nowhere_else(make_trainer):
    with make_trainer() as trainer:
        trainer.train(1)
        with pytest.raises(ConfigError, match="resume is 'elsewhere', and this trainer has begun"):
            trainer.train(resume="elsewhere")
        assert len(trainer.train(resume="auto")) == 3
