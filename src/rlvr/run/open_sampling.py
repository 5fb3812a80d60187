"""A model opened for sampling without training: its engine and the verifier of its responses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rlvr.config import Config
from rlvr.core.waits import StopRequest
from rlvr.data import Prompts
from rlvr.distributed import World
from rlvr.distributed.gpu_checks import check_gpus
from rlvr.evaluation.evaluation_loop import Collect
from rlvr.evaluation.held_out import check_lengths
from rlvr.monitor.console import Counts
from rlvr.planner import engine_of_run
from rlvr.policy import Policy, load_policy
from rlvr.policy.frozen_model import check_frozen
from rlvr.records import Task
from rlvr.rollout.weights import weight_buckets
from rlvr.run.rollout_runtime import RolloutRuntime
from rlvr.run.run_tasks import encoded_lengths
from rlvr.run.stage_checks import verifiers_of
from rlvr.verifiers.pool import Verification


@dataclass(frozen=True)
class OpenSampling:
    """A model with its engine and the verifier of its responses, open for sampling."""

    policy: Policy
    verification: Verification
    collect: Collect
    """Called on rank 0 alone. Samples are those that the trainer's own evaluation would draw: both sample with
    `RolloutRuntime.evaluation_samples`."""
    counts: Counts
    """The progress of sampling and verifying."""
    stop: StopRequest
    """Entered by whoever samples: signals are then requests to stop."""


@contextmanager
def open_sampling(
    config: Config, tasks: Sequence[Task], world: World, parts: Sequence[tuple[Config, Sequence[Task]]] = ()
) -> Iterator[OpenSampling]:
    """Open the sampling and verification of `config` for `tasks`, on all ranks of `world`.

    `parts`: the tasks again, where some are sampled with another configuration than others.
    """
    check_frozen(config.models)
    config, engine_reason = engine_of_run(config, world)
    check_gpus(config, world, engine_reason)
    stop = StopRequest("stopping; nothing will be written" if world.is_main else "")
    rollouts = RolloutRuntime(config, world, stop)
    with closing(rollouts):
        rollouts.take_verifiers([verifiers_of(config)])
        (verification,) = rollouts.verifications
        if world.is_main:
            verification.check(tasks)
        policy = load_policy(config.model, config.run.seed)
        prompts = Prompts(policy.tokenizer, config.data.template, lambda text: print(text, file=sys.stderr))
        rollouts.start_engine(policy)
        rollouts.attach_models(policy)
        # After the engine has started, whose context may be shorter than the model's.
        for of_part, some in parts or [(config, tasks)]:
            lengths = encoded_lengths(prompts, world, some)[0]
            check_lengths(of_part, some, lengths, rollouts.context, _warn if world.is_main else lambda text: None)
        # An engine samples only with published weights; 1 is any version.
        rollouts.hand_over(1, policy, lambda: weight_buckets(policy))
        collect = rollouts.evaluation_samples(config, verification, prompts)
        yield OpenSampling(policy, verification, collect, rollouts.activity.counts, stop)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
