"""The probe: proof, after weights were published, that the engine samples with them (N3).

A few tokens are sampled by the engine and scored by the trainer's policy; stale or half-loaded weights show as a gap
between the two log-probs. An engine that shares the trainer's weights needs none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from rlvr.core.needs import CURRENT, Need
from rlvr.core.waits import finished
from rlvr.data import Draw
from rlvr.errors import TrainingError
from rlvr.policy import Policy, forward, rows_of
from rlvr.records import Batch, Task
from rlvr.rollout.buffer import Collector
from rlvr.rollout.engine import Bucket, Completion, Engine, Request, Sampling
from rlvr.rollout.plans import make_rollout

# Arbitrary and small: the probe runs after every publish, and a stale layer shows in the log-prob of every token.
TOKENS = 8
"""Length of the probe's prompt, and of what is sampled after it."""
# Far above what 8 tokens take; a first request may wait for vLLM to compile.
SECONDS = 300.0
"""Deadline of the probe."""
LOW_PRECISION = 0.5
"""Nats that the mean gap may have where the engine computes in fp8: a head that kept its old weights is 0.7 to 1.6
off."""
# Arbitrary: what a user who pressed Ctrl-C will wait.
STOP_SECONDS = 10.0
"""Deadline of the probe once the run was told to stop: its step is finished first, but not at any price."""


def probe(
    engine: Engine,
    policy: Policy,
    collector: Collector,
    weights: Callable[[], Iterable[Bucket]] = tuple,
    share: Callable[[Completion], Completion] = lambda sampled: sampled,
    low_precision: bool = False,
) -> float:
    """The mean gap of log-probs, in nats, between engine and policy on a fixed prompt.

    TrainingError when it is over what rounding explains (1e-3 in float32, 0.1 in bfloat16, LOW_PRECISION where the
    engine computes in less than the policy's type), with the names of the tensors of `weights` that the engine holds
    otherwise, where it can tell. `share` gives every rank what rank 0's engine sampled, where ranks score together.
    """
    # The tokenizer may have fewer ids than the embedding (padded for kernels) or more (added tokens that the model
    # lacks).
    vocabulary = min(len(policy.tokenizer), policy.causal_lm.config.get_text_config().vocab_size)
    context = min(policy.context, engine.context)  # vLLM may have been given a shorter one
    # 7919 is a prime: multiples of it are spread over the vocabulary, so that many rows of the embedding take part.
    prompt = tuple(i * 7919 % vocabulary for i in range(1, 1 + min(TOKENS, context // 2)))
    sampling = Sampling(min(TOKENS, context - len(prompt)), ignore_eos=True)
    # without the engine's own constraint, whose log-probs are of another distribution than the policy's
    request = Request(prompt, sampling, seed=0, constraint={})
    completion = share(_sampled(engine, collector, request))
    rollout = make_rollout(Draw(0, Task("probe", "")), 0, request, completion)
    rows = rows_of(Batch([rollout]), np.arange(1), [rollout.sampled], 0, policy.device)
    with torch.no_grad(), policy.evaluating():
        ours = forward(policy, rows, [Need("logprobs")])["logprobs", CURRENT]
    # gap = mean |log pi_trainer(t) - log pi_engine(t)| over the sampled tokens, in nats.
    gap = float((ours.cpu() - torch.from_numpy(completion.logprobs)).abs().mean())
    # `not gap <=` and not `gap >`, so that NaN is refused. 1e-3: largest gaps of a run in float32 were 5e-5 to 1.3e-4
    # (docs/rollouts.md, Learning with each). 0.1: bfloat16 alone has 0.016 a token for a random policy (same page,
    # Speculation and fp8).
    if not gap <= (LOW_PRECISION if low_precision else 1e-3 if policy.dtype == torch.float32 else 0.1):
        names = engine.mismatched_weights(weights)
        if names:
            difference = f"these tensors differ: {', '.join(names)}"
        else:
            difference = "no tensor that can be compared differs"
        raise TrainingError(
            f"the engine does not sample with the weights that were published as version {engine.version}: its "
            f"log-probs are {gap:.3g} nats off on a fixed prompt; {difference}"
        )
    return gap


def _sampled(engine: Engine, collector: Collector, request: Request) -> Completion:
    """The engine's completion. WaitTimeoutError when it does not come within SECONDS, or STOP_SECONDS of being told to
    stop."""
    what = f"the probe of version {engine.version} of the weights to be sampled"
    # On the collector's loop, where all requests are: an engine is not for two loops at once.
    work = collector.submit(engine.generate(request))
    try:
        if not finished(work, what, time.monotonic() + SECONDS, collector.interrupted):
            finished(work, f"{what} before the run stops", time.monotonic() + STOP_SECONDS)
    # Also KeyboardInterrupt: the request must not stay open while the engine is closed.
    except BaseException:
        work.cancel()
        raise
    return work.result()
