"""An evaluation that fails costs its own results only: the step is saved before, the run goes on, a resume makes it
up."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from rlvr import GRPOTrainer
from rlvr.errors import EvaluationError, TrainingError
from small_run import changed, lines, overlaid, task_rows, timeless, weights

OVER = {
    "run": {"steps": 4},
    "evaluation": {"every": 2, "at_start": False, "at_end": False},
    "checkpoint": {"every": 1, "keep": 9, "background": False},
}
HELD_OUT = [{**row, "id": f"e{row['id']}"} for row in task_rows(3)]


def trainer_of(tree, failing, steps=()):
    """A trainer whose evaluations at these steps fail: the verifier hangs past the deadline, or the engine is in
    trouble."""

    async def reward(completion, task):
        if failing == "timeout" and task.id.startswith("e") and trainer.step in steps:
            await asyncio.sleep(600)
        return len(set(completion)) / 6

    trainer = GRPOTrainer(config=tree, verifier=reward, eval_tasks=HELD_OUT)
    sample = trainer.rollouts.engine.generate

    async def generate(request):
        if failing == "engine" and request.sampling.temperature == 0 and trainer.step in steps:  # greedy, so evaluating
            raise TrainingError("the engine has a fault")
        return await sample(request)

    trainer.rollouts.engine.generate = generate
    return trainer


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self):
        self.logged = []

    def start(self, run, directory):
        pass

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def finish(self):
        pass


@pytest.mark.gate
@pytest.mark.parametrize(
    ("failing", "reason"),
    [("timeout", "WaitTimeoutError: waited .* for rollouts"), ("engine", "TrainingError: the engine has")],
)
def test_a_failed_evaluation_does_not_end_the_run(make_tree, caplog, failing, reason):
    over = overlaid(OVER, {"rollout": {"deadline": 3.0}} if failing == "timeout" else {})
    with trainer_of(make_tree(over, "whole"), "") as whole:
        whole.train()
    saved = []
    with caplog.at_level(logging.WARNING), trainer_of(make_tree(over, "cut"), failing, {2, 4}) as cut:
        evaluate = cut.evaluator.evaluate

        def evaluating(tasks=None):
            saved.append((cut.folder.checkpoints / f"step-{cut.step}" / "complete.json").exists())
            return evaluate()

        cut.evaluator.evaluate = evaluating
        cut.train()
        with pytest.raises(EvaluationError, match=f"the evaluation at step 4 failed: {reason}"):
            evaluate()
    assert cut.step == 4 and saved == [True, True]
    assert [f"the evaluation at step {step} failed" in caplog.text for step in (1, 2, 3, 4)] == [
        False,
        True,
        False,
        True,
    ]
    written = lines(cut.folder.path / "metrics.jsonl")
    assert [row["step"] for row in written] == [1, 2, 3, 4]
    plain = [{**row, "eval": None} for row in timeless(whole.metrics, "eval/")]
    assert [{**row, "eval": None} for row in timeless(written, "eval/")] == plain
    assert not any(name.startswith("eval/") and value is not None for row in written for name, value in row.items())
    assert changed(weights(whole), weights(cut)) == []
    # Resumed where it ended, it makes up for the last evaluation.
    with trainer_of(make_tree(over, "cut"), "") as again:
        again.reporting.trackers = [tracker := Kept()]
        again.train(resume="auto")
    assert tracker.logged == [(4, again.metrics[3])]
    written = lines(cut.folder.path / "metrics.jsonl")
    assert timeless(written[3:]) == timeless(whole.metrics[3:])
    assert [row["step"] for row in lines(cut.folder.path / "evaluations.jsonl")] == [4]


@pytest.mark.parametrize("kept", ["nothing", "the evaluation", "the line without it"])
def test_a_kill_between_a_step_is_saved_and_its_line_is_written_costs_nothing(make_tree, kept):
    """What such kills leave of the last step, and what a resume makes of it."""
    with trainer_of(make_tree(OVER, "run"), "") as whole:
        whole.train()
    files = [whole.folder.path / name for name in ("metrics.jsonl", "evaluations.jsonl")]
    before = [timeless(lines(file)) for file in files]
    metrics = lines(files[0])
    if kept == "nothing":
        files[1].write_text(json.dumps(lines(files[1])[0]) + "\n")
    last = {name: None if name.startswith("eval/") else value for name, value in metrics[-1].items()}
    metrics[-1:] = [last] if kept == "the line without it" else []
    files[0].write_text("".join(json.dumps(row) + "\n" for row in metrics))
    evaluated = []
    with trainer_of(make_tree(OVER, "run"), "") as again:
        evaluate = again.evaluator.evaluate
        again.evaluator.evaluate = lambda tasks=None: evaluated.append(again.step) or evaluate(tasks)
        again.train(resume="auto")
    assert [timeless(lines(file)) for file in files] == before
    assert timeless(again.metrics) == before[0] and timeless(again.evaluations) == before[1]
    assert evaluated == ([4] if kept == "nothing" else [])  # one that was made is not made again


def test_a_baseline_that_fails_is_not_promised(make_tree, caplog):
    over = overlaid(OVER, {"run": {"steps": 1}, "evaluation": {"at_start": True}})
    with caplog.at_level(logging.WARNING), trainer_of(make_tree(over, "run"), "engine", {0}) as trainer:
        trainer.train()
    assert "the evaluation at step 0 failed" in caplog.text
    assert "when it is due, the one at the start is left out" in caplog.text
    assert trainer.evaluations == []
