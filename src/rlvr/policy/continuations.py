"""Log-probs of given token ids after given others, under the policy as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.config import OptimConfig
from rlvr.core.needs import CURRENT, Need
from rlvr.policy.columns import add_statistics
from rlvr.policy.model import Policy
from rlvr.records import Batch, Origin, Rollout, StopReason, Task


def encoded(policy: Policy, text: str) -> list[int]:
    """The token ids of a text by itself; of no text, the token that a text begins after."""
    if text:
        return [int(i) for i in policy.tokenizer.encode(text, add_special_tokens=False)]
    tokenizer = policy.tokenizer
    # Models without a beginning token, such as Qwen2, get the end token, which stands between texts.
    return [int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)]


def continuation_logprobs(
    policy: Policy, asked: Sequence[tuple[Sequence[int], Sequence[int]]], config: OptimConfig
) -> list[np.ndarray]:
    """float64 [K] each: of the K target ids of every (context, target), at temperature 1; both must not be empty.

    NaN where context and target do not fit into the policy's context.
    """
    fits = [n for n, (context, target) in enumerate(asked) if len(context) + len(target) <= policy.context]
    batch = Batch([_given(n, *asked[n]) for n in fits])
    where = [r.origin == Origin.DEMONSTRATION for r in batch.rollouts]
    add_statistics(policy, batch, [Need("logprobs")], where, config)
    logprobs = [np.full(len(target), np.nan) for _, target in asked]
    for n, values, on in zip(fits, batch.token_columns[f"logprobs/{CURRENT}"], where, strict=True):
        logprobs[n] = values[on].astype(np.float64)
    return logprobs


def _given(number: int, context: Sequence[int], target: Sequence[int]) -> Rollout:
    ids = np.asarray([*context, *target], dtype=np.int64)
    origin = np.full(len(ids), Origin.DEMONSTRATION, dtype=np.int8)
    # Only the target's tokens are read: `where` marks origin DEMONSTRATION.
    origin[: len(context)] = Origin.PROMPT
    return Rollout(
        id=f"given/{number}",
        task=Task(id="given", prompt=""),
        group=f"given/{number}",
        member=0,
        token_ids=ids,
        origin=origin,
        behaviour_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        policy_version=np.full(len(ids), -1, dtype=np.int32),
        stop=StopReason.GIVEN,
    )
