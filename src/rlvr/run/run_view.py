"""A run as its user and its callbacks see it: what it is, what it has done, its report and its model on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.distributed import World
from rlvr.errors import ConfigError, short_tracebacks
from rlvr.policy import Policy
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.run_folder import RunFolder
from rlvr.run.train_state import TrainState


@short_tracebacks("report", "push_to_hub")
class RunView:
    """The public side of a run, which the trainer extends."""

    world: World
    resolved: ResolvedConfig
    training: PolicyTraining
    state: TrainState
    folder: RunFolder

    @property
    def config(self) -> Config:
        """The configuration of the run, without `auto`."""
        return self.resolved.config

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.training.policy

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def step(self) -> int:
        """Steps done, over all stages."""
        return self.state.step

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record for each step done."""
        return self.state.metrics

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """One row of results for each evaluation, with its step and stage."""
        return self.state.evaluations

    def report(self) -> Path:
        """Write report.html of the run folder, for a browser; its path. ConfigError before the first step."""
        # Its pages and charts are imported by those who ask for one.
        from rlvr.report import write_report

        if not self.path.exists():
            raise ConfigError(f"there is no run in {self.path} to report on yet: call train() first")
        return write_report([self.path])

    def push_to_hub(self, repo: str = "", *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the model of the newest checkpoint, with a model card, to the Hugging Face hub; its address.

        `repo` is `name` or `owner/name`, made where it is not there, `private` as the owner's default says where it is
        None. ConfigError where there is no name, no token or no checkpoint, before anything is uploaded. With several
        ranks the first one uploads; the address is empty on the others.
        """
        from rlvr.run.hub import push

        if not self.world.is_main:
            return ""
        return push(self.folder, self.resolved, self.state, repo, private, token)
