"""The evaluations that a run makes by itself: when they are due, and what becomes of those that a stop or a failure cut
off.

Invariant: an evaluation that fails or is stopped costs its own results only; that of the last step stays pending, is
part of the checkpoint and is made when training goes on from that step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlvr.distributed import World
from rlvr.errors import EvaluationError
from rlvr.monitor.metrics import record
from rlvr.run.callbacks import Callbacks
from rlvr.run.checkpointing import Checkpointer
from rlvr.run.reporting import Reporting
from rlvr.run.run_tasks import RunTasks
from rlvr.run.train_state import TrainState
from rlvr.stages import Stage

log = logging.getLogger(__name__)


@dataclass
class DueEvaluations:
    """Makes the evaluations of a run that are due. With several ranks every method is called on all of them.

    `evaluate` is the trainer's own method, so that a subclass that replaces it decides what these are.
    """

    evaluate: Callable[[], dict[str, Any]]
    state: TrainState
    tasks: RunTasks
    reporting: Reporting
    checkpointer: Checkpointer
    world: World
    callbacks: Callbacks

    def at_start(self, stage: Stage) -> None:
        """Make the baseline evaluation of a run, where the stage asks for it and there is none."""
        due = self.state.step == 0 and stage.config.evaluation.at_start and not self.state.evaluations
        if due and self.tasks.evaluation(stage.config):
            self._results_or_nothing()

    def plan(self, stage: Stage) -> None:
        """Note whether the step that was just counted is to be evaluated."""
        evaluation = stage.config.evaluation
        # A stage ends at its own steps, or earlier where `run.steps` allows it fewer.
        last = self.state.stage_step in (stage.steps, stage.plan.allowed)
        now = (last and evaluation.at_end) or (evaluation.every and self.state.step % evaluation.every == 0)
        # Set before the checkpoint of this step is written and cleared after its evaluation, so that a resume from it
        # makes the evaluation that a kill prevented.
        self.state.evaluation_pending = bool(now) and bool(self.tasks.evaluation(stage.config))

    def after_step(self) -> None:
        """Evaluate the last step, where that is pending, and complete its record. It stays pending where a stop or a
        failure cut the evaluation off."""
        if not self.state.evaluation_pending:
            return
        # The results go into the record of the step, which is already in `state.metrics` but not yet written to
        # metrics.jsonl.
        if results := self._results_or_nothing():
            self.state.evaluation_pending = False
            self.state.metrics[-1] = record({**self.state.metrics[-1], **results})
            self.checkpointer.after_evaluation()

    def make_up(self) -> None:
        """Evaluate where a stop, a kill or a failure kept the last step from it, and complete the step's line. Show
        the callbacks an evaluation that they have not seen."""
        if self.state.unseen_evaluation is not None:
            row = self.state.unseen_evaluation
            self.state.unseen_evaluation = None
            self.callbacks.on_evaluation({name: row[name] for name in row if name not in ("step", "stage")})
        if not self.state.evaluation_pending:
            return
        self.after_step()
        # Here, unlike in a step, the line was written before the interruption, without the results.
        if not self.state.evaluation_pending:
            self.reporting.completed_step(self.state.metrics[-1])

    def _results_or_nothing(self) -> dict[str, Any]:
        """The results of an evaluation; none where it was stopped or failed, which does not end the run."""
        try:
            results = self.evaluate()
        except EvaluationError as error:
            # The error is raised on all ranks; one of them logs it.
            if self.world.is_main:
                later = "the one at the start is left out"
                if self.state.step:
                    later = "this one when the run is resumed here"
                log.warning(
                    "%s. Training goes on: the next evaluation is made when it is due, %s",
                    error,
                    later,
                    exc_info=error.__cause__,
                )
            return {}
        if results:
            self.callbacks.on_evaluation(results)
        return results
