"""The engine, the verifiers and the threads that sample and verify the rollouts of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlvr.config import Config
from rlvr.config.stage_plan import longest_sequence
from rlvr.core.waits import StopRequest
from rlvr.data import Draw, History, Prompts
from rlvr.distributed import World
from rlvr.distributed.engine_router import open_engine, verify_weight_sync
from rlvr.evaluation import Collect
from rlvr.policy import Policy
from rlvr.records import Rollout
from rlvr.rollout import Activity, Bucket, Collector, Engine, Published, RolloutContext, Sampling, evaluation_plan
from rlvr.rollout.engine import InFlight
from rlvr.rollout.vllm.options import low_precision
from rlvr.run.loaded_models import EngineSampler, LoadedModels
from rlvr.run.policy_training import PolicyTraining
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.run_tasks import RunTasks
from rlvr.run.stage_checks import StageVerifiers
from rlvr.verifiers import VerifierPool
from rlvr.verifiers.pool import Verification


class RolloutRuntime:
    """The engine, verifiers and threads of all stages and evaluations. `open` starts the engine; `close` ends
    everything.

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
        self.pool = VerifierPool(checks.workers, checks.time_limit, checks.memory_mb, checks.concurrent)
        self.collector = Collector(stop.__bool__)
        self._engines = contextlib.ExitStack()
        """Closes the engine, where one was opened."""
        self.models = LoadedModels({})
        """The models that verifiers ask; on rank 0."""
        self.published: Published | None = None
        """The engine's account of the weights that were published last."""
        self.closed = False

    def open(self, resolved: ResolvedConfig, training: PolicyTraining, tasks: RunTasks) -> None:
        """Take the verifiers of a run and start its engine."""
        self.take_verifiers(resolved.verifiers)
        # Without it no request is open while weights change, and the engine need not be able to go on with new ones.
        samples_ahead = any(plan.config.rollout.staleness for plan in resolved.plans)
        self.start_engine(
            training.policy,
            in_flight=self.config.rollout.in_flight if samples_ahead else None,
            partitions=training.partitions,
            longest=longest_sequence(resolved.plans, tasks.longest_evaluated),
        )
        self.attach_models(training.policy)

    def take_verifiers(self, made: Sequence[StageVerifiers]) -> None:
        """Let the pool run these verifiers, those of each stage."""
        self.verifications = [Verification(own, self.pool, named) for own, named in made]

    def start_engine(
        self, policy: Policy, *, in_flight: InFlight | None = None, partitions: bool = False, longest: int | None = None
    ) -> None:
        """Start the engine that the configuration names, on all ranks; its options are those of `open_engine`."""
        spec = self.config.rollout.engine
        self.engine = open_engine(spec, policy, in_flight, self.world, self.collector, partitions, longest)
        # In `close` the engine ends after the collector: plans that run would wait for an engine that is gone.
        self._engines.callback(self.engine.close)
        self.context = min(policy.context, self.engine.context)  # vLLM may have been given a shorter one

    def attach_models(self, policy: Policy) -> None:
        """Give the verifiers, on rank 0, which alone verifies, the run's models; the engine has been started.
        ConfigError where one is not there or does not fit."""
        if not self.world.is_main:
            return
        seed = self.config.run.seed
        submit = self.collector.submit
        sampler = EngineSampler.of_policy(self.engine, policy.tokenizer, submit, seed)
        self.models = LoadedModels(self.config.models, seed, sampler, submit)
        for verification in self.verifications:
            verification.attach(self.models)

    def warn_of_unused_models(self, message: Callable[..., None]) -> None:
        """Report which frozen models no verifier has asked for, once the verifiers of all tasks are known."""
        if self.models.unused:
            message(
                f"models: no verifier uses {', '.join(self.models.unused)}, so that it is not loaded: name it in a "
                "verifier (`model: NAME` of scorer and step_scorer, `backend: NAME` of a judge), or leave it out",
                "warning",
            )

    def model_records(self) -> dict[str, dict[str, Any]]:
        """Frozen model -> where it is from, on rank 0, for the manifest of a checkpoint."""
        return self.models.records()

    def rollout_context(
        self, verification: Verification, prompts: Prompts, sampling: Sampling, group_size: int, *path: int | str
    ) -> RolloutContext:
        """The context that plans make rollouts with. Seeds follow `path`, so that nothing depends on the order of
        events (N7)."""
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

    def evaluation_samples(self, config: Config, verification: Verification, prompts: Prompts) -> Collect:
        """Return the function that samples and verifies the responses of an evaluation under `config`, on rank 0. It
        raises CollectionInterruptedError when the run is to stop.

        Seeds follow from the run's seed, task, member and call, so that `rlvr.evaluate` draws what a run's evaluation
        draws.
        """
        plan = evaluation_plan(config.rollout.plan)

        def collect(draws: Sequence[Draw], sampling: Sampling, samples: int) -> list[Rollout]:
            # The path has neither stage nor step: every evaluation draws with the same seeds, so that a change is the
            # policy's.
            context = self.rollout_context(verification, prompts, sampling, samples, "evaluation")
            return self.collector.collect(draws, plan, context, config.rollout.deadline)

        return collect

    def publish(self, version: int, training: PolicyTraining) -> None:
        """Hand the weights that are trained to the engine as `version`, on all ranks."""
        backend = training.backend
        # An engine with weights of its own needs memory while the trainer waits; gradients (on a GPU) and, with
        # `offload_during_rollout`, the optimizer's state leave it. The HF engine shares the weights and needs none of
        # that.
        if not self.engine.shares_weights or self.config.distributed.offloads_during_rollout:
            backend.release()
        self.hand_over(version, training.policy, backend.named_weights)

    def hand_over(self, version: int, policy: Policy, weights: Callable[[], Iterable[Bucket]]) -> None:
        """Give the engine weights as `version`, on all ranks. TrainingError when it does not sample with them."""
        self.published = self.engine.publish(version, weights)
        if not self.engine.shares_weights:
            # An engine that computes in fp8, say, has other log-probs than the trainer however well the weights were
            # sent.
            coarse = bool(low_precision(self.config.rollout.engine))
            verify_weight_sync(self.engine, self.world, policy, self.collector, weights, coarse)

    def close(self) -> None:
        """End threads, engine and verifier processes."""
        self.closed = True
        # First what asks, then what answers: plans use the engine and the pool.
        self.collector.close()
        self._engines.close()
        self.pool.close()
