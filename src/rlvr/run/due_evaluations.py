"""The evaluations that a run makes by itself: when they are due, and what becomes of those that a stop or a failure cut off.

Invariant: an evaluation that fails or is stopped costs its own results only; that of the last step stays pending, is part of
the checkpoint and is made when training goes on from that step.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlvr.errors import EvaluationError
from rlvr.monitor.metrics import record

if TYPE_CHECKING:
    from rlvr.stages import Stage
    from rlvr.trainer import GRPOTrainer

log = logging.getLogger(__name__)


class DueEvaluations:
    """Makes the evaluations of a trainer's run that are due. With several ranks every method is called on all of them."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def at_start(self, stage: Stage) -> None:
        """Make the baseline evaluation of a run, where the stage asks for it and there is none."""
        trainer = self.trainer
        asked = trainer.state.step == 0 and stage.config.evaluation.at_start and not trainer.state.evaluations
        if asked and trainer.tasks.evaluation(stage.config):
            self._results_or_nothing()

    def plan(self, stage: Stage) -> None:
        """Note whether the step that was just counted is to be evaluated."""
        trainer, asked = self.trainer, stage.config.evaluation
        last = trainer.state.stage_step in (stage.steps, stage.plan.allowed)
        now = (last and asked.at_end) or (asked.every and trainer.state.step % asked.every == 0)
        self.trainer.state.evaluation_pending = bool(now) and bool(trainer.tasks.evaluation(stage.config))

    def after_step(self) -> None:
        """Evaluate the last step, where that is pending, and complete its record. It stays pending where a stop or a failure
        cut the evaluation off."""
        if not self.trainer.state.evaluation_pending:
            return
        trainer = self.trainer
        if results := self._results_or_nothing():
            self.trainer.state.evaluation_pending = False
            trainer.state.metrics[-1] = record({**trainer.state.metrics[-1], **results})
            trainer.saver.after_evaluation()

    def make_up(self) -> None:
        """Evaluate where a stop, a kill or a failure kept the last step from it, and complete the step's line."""
        if not self.trainer.state.evaluation_pending:
            return
        trainer = self.trainer
        self.after_step()
        if trainer.world.leads and not self.trainer.state.evaluation_pending:
            trainer.folder.metrics.truncate_after(trainer.state.step - 1)
            trainer.folder.metrics.append(trainer.state.metrics[-1])
            for tracker in trainer.reporting.trackers:
                tracker.log(
                    trainer.state.step, trainer.state.metrics[-1]
                )  # whole: a kill may have kept the step from them too

    def _results_or_nothing(self) -> dict[str, Any]:
        """The results of an evaluation; none where it was stopped or failed, which does not end the run."""
        trainer = self.trainer
        try:
            return trainer.evaluate()
        except EvaluationError as error:
            if trainer.world.leads:
                this = (
                    "this one when the run is resumed here"
                    if trainer.state.step
                    else "the one at the start is left out"
                )
                log.warning(
                    "%s. Training goes on: the next evaluation is made when it is due, %s",
                    error,
                    this,
                    exc_info=error.__cause__,
                )
            return {}
