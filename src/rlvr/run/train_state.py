"""The progress of a run: its counters and the records of its steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """The counters of a run, which a checkpoint holds, and its records, which the log files of the run folder hold."""

    step: int = 0
    """Steps done, over all stages."""
    version: int = 0
    """Version of the policy's weights: optimised batches."""
    stage_number: int = 0
    """Number of the stage that trains, from 0."""
    stage_step: int = 0
    """Steps done of that stage."""
    nonfinite: int = 0
    """Steps in a row that had to be skipped."""
    evaluation_pending: bool = False
    """The last step is due for evaluation and was not evaluated, for example because of a stop, a kill or a failure."""
    unseen_evaluation: dict[str, Any] | None = None
    """The row of the last step's evaluation where it was made after the checkpoint that was resumed from, whose
    callbacks have not seen it; not part of one."""
    first_step: int | None = None
    """The first step of this process, where it went on from a checkpoint; not part of one."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One record for each step done."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """One row of results for each evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the number of step records (`logged`), under the names of the checkpoint format."""
        return {
            "step": self.step,
            "version": self.version,
            "stage_number": self.stage_number,
            "stage_step": self.stage_step,
            "nonfinite": self.nonfinite,
            "owes_evaluation": self.evaluation_pending,
            "logged": len(self.metrics),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the counters. The records stay as they are: they are read from the log files."""
        self.step = state["step"]
        self.version = state["version"]
        self.stage_number = state["stage_number"]
        self.stage_step = state["stage_step"]
        self.nonfinite = state["nonfinite"]
        self.evaluation_pending = state["owes_evaluation"]
        self.first_step = self.step + 1
