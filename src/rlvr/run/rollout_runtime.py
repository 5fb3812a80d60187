"""The engine, the verifiers and the threads that sample and verify the rollouts of a run."""

from __future__ import annotations

import contextlib
from typing import Any

from rlvr.config import Config
from rlvr.config.stage_plan import longest_sequence
from rlvr.core.waits import StopRequest
from rlvr.data import History, Prompts
from rlvr.distributed import World
from rlvr.distributed.farm import open_engine, prove
from rlvr.rollout import Activity, Collector, Engine, Published, RolloutContext, Sampling
from rlvr.rollout.vllm.options import low_precision
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.run_tasks import RunTasks
from rlvr.verifiers import VerifierPool
from rlvr.verifiers.pool import Verification


class RolloutRuntime:
    """What all stages and evaluations sample and verify with. `open` starts the engine; `close` ends everything.

    Collecting is interrupted once `stop` is set.
    """

    engine: Engine
    context: int
    """Longest sequence in tokens, prompt and response together, that can be sampled and trained."""
    verifications: list[Verification]
    """The verifiers of each stage."""

    def __init__(self, config: Config, world: World, stop: StopRequest) -> None:
        checks = config.verification
        self.config = config
        self.world = world
        self.history = History()
        self.activity = Activity()
        self.pool = VerifierPool(
            checks.workers, checks.time_limit, checks.memory_mb, checks.concurrent, self.activity.patience
        )
        self.collector = Collector(stop.__bool__)
        self._engines = contextlib.ExitStack()
        """Closes the engine, where one was opened."""
        self.published: Published | None = None
        """The engine's account of the weights that were published last."""

    def open(self, resolved: ResolvedConfig, training: PolicyTraining, tasks: RunTasks, verifier: Any) -> None:
        """Build the verifiers and start the engine; `verifier` is one given in Python, in the place of the configuration's."""
        self.verifications = [
            Verification(verifier if verifier is not None else plan.config.verifier, self.pool)
            for plan in resolved.plans
        ]
        samples_ahead = any(plan.config.rollout.staleness for plan in resolved.plans)
        rollout = self.config.rollout
        self.engine = open_engine(
            rollout.engine,
            training.policy,
            rollout.in_flight if samples_ahead else None,
            self.world,
            self.collector,
            training.partitions,
            longest_sequence(resolved.plans, tasks.longest_evaluated),
        )
        self._engines.callback(self.engine.close)
        self.context = min(training.policy.context, self.engine.context)  # vLLM may have been given a shorter one

    def rollout_context(
        self, verification: Verification, prompts: Prompts, sampling: Sampling, group_size: int, *path: int | str
    ) -> RolloutContext:
        """The context that plans make rollouts with. Seeds follow `path`, so that nothing depends on the order of events (N7)."""
        return RolloutContext(
            self.engine,
            verification,
            prompts,
            sampling,
            group_size,
            context=self.context,
            history=self.history,
            seed_path=(self.config.run.seed, *path),
            activity=self.activity,
        )

    def publish(self, version: int, training: PolicyTraining) -> None:
        """Hand the weights to the engine as `version`, on all ranks. TrainingError when the engine does not sample with them."""
        backend = training.backend
        if not self.engine.shares_weights or self.config.distributed.offloads_during_rollout:
            backend.release()
        self.published = self.engine.publish(version, backend.named_weights)
        if not self.engine.shares_weights:
            coarse = bool(low_precision(self.config.rollout.engine))
            prove(self.engine, self.world, training.policy, self.collector, backend.named_weights, coarse)

    def close(self) -> None:
        """End threads, engine and verifier processes."""
        self.collector.close()
        self._engines.close()
        self.pool.close()
