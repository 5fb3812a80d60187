"""The facts of a run that a checkpoint has to fit: engine, configuration and evaluation tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlvr.config.renamed_keys import with_new_names
from rlvr.data.samplers import fingerprint_of
from rlvr.distributed import World
from rlvr.errors import CheckpointError
from rlvr.monitor.console import Level
from rlvr.policy import Policy
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.run_folder import RunFolder
from rlvr.run.run_tasks import RunTasks


class RunIdentity:
    """Writes these facts into checkpoints, and checks a checkpoint by them. (Stages check their own training tasks.)"""

    def __init__(self, resolved: ResolvedConfig, tasks: RunTasks, folder: RunFolder) -> None:
        self.resolved = resolved
        self.tasks = tasks
        self.folder = folder
        self._fingerprints: list[str] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The facts, under the names of the checkpoint format."""
        return {
            "evaluated_on": self._evaluated_on(),
            "config": self.resolved.config.dump(),
            "recorded": self.folder.given.tree,
        }

    def check(
        self, state: Mapping[str, Any], world: World, policy: Policy, report: Callable[[str, Level], None]
    ) -> None:
        """CheckpointError where the state of a checkpoint is of another run. Values of `auto` are taken over
        from it.

        `report` is told, as (text, level), of values that do not fit here.
        """
        # A checkpoint of the version before has keys under their old names.
        config = with_new_names(state["config"])
        self.resolved.check_engine(config["rollout"]["engine"])
        # Before the comparison of configurations: values that `auto` takes here may differ from those in the
        # checkpoint.
        self.resolved.take_saved_values(config, world, policy, report)
        self.folder.check(config, with_new_names(state.get("recorded", config)), self.resolved.automatic_keys)
        self._check_evaluation_tasks(state["evaluated_on"])

    def _check_evaluation_tasks(self, saved: list[str]) -> None:
        """CheckpointError where the evaluation tasks are others, and that was not accepted."""
        if self.resolved.config.checkpoint.accept_changed_data:
            return
        for plan, before, now in zip(self.resolved.plans, saved, self._evaluated_on(), strict=True):
            if before != now:
                raise CheckpointError(
                    f"the checkpoint was made with other evaluation tasks (stage {plan.name!r}: fingerprint {before}, "
                    f"now {now}): its results would not be comparable. Put the data back, or set "
                    "checkpoint.accept_changed_data=true"
                )

    def _evaluated_on(self) -> list[str]:
        """Fingerprints of the stages' evaluation tasks."""
        if self._fingerprints is None:
            tasks = [self.tasks.evaluation(plan.config) for plan in self.resolved.plans]
            # Kept: it goes through the text of every task, and each checkpoint asks for it.
            self._fingerprints = [fingerprint_of(of_stage) for of_stage in tasks]
        return self._fingerprints
