"""The policy of a run, with the backend and the learner that train it."""

from __future__ import annotations

from typing import Any

from rlvr import registry
from rlvr.config import Config
from rlvr.distributed import Backend, BackendFactory, World
from rlvr.learner import Learner
from rlvr.policy import Snapshot, given_policy, load_policy
from rlvr.stages import Stage


class PolicyTraining:
    """Holds the policy for the whole run, and opens a fresh backend and learner for each stage.

    `model` is a loaded model with its `tokenizer`, or None for the one that the configuration names.
    """

    learner: Learner
    """That of the current stage; there is none before the first `enter`."""

    def __init__(self, config: Config, world: World, model: Any = None, tokenizer: Any = None) -> None:
        self.world = world
        self.backends: BackendFactory = registry.build("backend", config.distributed.backend_spec)
        if model is None:
            self.policy = load_policy(config.model, config.run.seed, self.backends.partitions, world.is_main)
        else:
            self.policy = given_policy(model, tokenizer, config.model, config.run.seed, self.backends.partitions)

    @property
    def partitions(self) -> bool:
        """The weights lie in parts on several ranks."""
        return self.backends.partitions

    @property
    def backend(self) -> Backend:
        """That of the current stage."""
        return self.learner.backend

    def enter(self, stage: Stage) -> None:
        """Open a fresh optimizer for a stage, and take a snapshot of the policy where the stage keeps a reference.

        Both take device memory: the engine has to be released before.
        """
        # Before the snapshot, which copies the weights as they lie: DeepSpeed may change their type and partition them.
        backend = self.backends.open(self.policy, stage.config.optim.optimizer, self.world)
        stage.reference = None
        if stage.keeps_reference:
            stage.reference = Snapshot(self.policy, stage.reference_follows)
        self.learner = Learner(backend, stage.reference, self.world)
