"""The task's answer in the place of the policy's own, as tokens that are learned (VeriFree)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlvr.config import Config, SpliceConfig
from rlvr.core.answer_text import with_answer
from rlvr.core.needs import PROXIMAL_LOGPROBS
from rlvr.errors import ConfigError
from rlvr.losses import Objective
from rlvr.policy import Policy
from rlvr.policy.statistics import encoded
from rlvr.records import Batch, Origin, Rollout
from rlvr.rewards.likelihood import tokens_before_answer
from rlvr.rollout.characters import char_ends
from rlvr.stages.grpo.appended import filler


def check_splice(config: Config, objective: Objective) -> None:
    """ConfigError where a loss needs what the tokens of an answer do not have: a log-prob under the policy that
    sampled, or the one advantage of their response."""
    if config.algorithm.splice is None:
        return
    name = config.algorithm.loss.name
    loss = objective.components[0].loss
    if loss.per_response:
        raise ConfigError(
            f"algorithm.splice gives the answer's tokens a weight of their own, and the loss {name!r} takes one "
            "advantage per response: choose a loss of tokens"
        )
    if objective.correction is not None:
        raise ConfigError(
            "algorithm.splice learns tokens that nobody sampled, which algorithm.correction cannot weigh by the ratio "
            "to the policy that sampled: set correction to null"
        )
    updates = config.optim.updates_per_batch * config.optim.epochs_per_batch
    if updates > 1 and PROXIMAL_LOGPROBS in loss.needs and not objective.recalls_update:
        raise ConfigError(
            f"algorithm.splice learns tokens that nobody sampled, and the loss {name!r} takes the ratio of later "
            "optimizer steps to the policy that sampled: set algorithm.decoupled to true, or optim.updates_per_batch "
            "and epochs_per_batch to 1"
        )


def with_answers(batch: Batch, splice: SpliceConfig, policy: Policy) -> Batch:
    """The batch with each decided response cut after `splice.opening`, and the task's answer put there.

    The answer's tokens have the origin HINT and the policy's weight of 1; the token column `advantage`, which goes
    before the column, has the weight that `splice.by` names there. A response is only cut where the answer does
    not fit the policy's context, and is left as it is where it has no opening, no weight or its task no answer.
    """
    weights = batch.tokens("weight/policy")
    advantages = [np.asarray(values, dtype=np.float64) for values in batch.tokens("advantage")]
    # [B]: the tokens that stay and those that are put after them; None where the response stays as it is.
    cuts = [
        _cut(rollout, splice, policy) if weight.any() else None
        for rollout, weight in zip(batch.rollouts, weights, strict=True)
    ]

    def changed(columns: list[np.ndarray], values: Sequence[float]) -> list[np.ndarray]:
        """The columns with one of `values`, [B], at each token of an answer."""
        return [
            # In the column's own type: a Python float would make float64 of float32.
            own if cut is None else np.append(own[: cut[0]], np.full(len(cut[1]), value, dtype=own.dtype))
            for own, value, cut in zip(columns, values, cuts, strict=True)
        ]

    size = len(batch)
    columns = {name: changed(own, [filler(name)] * size) for name, own in batch.token_columns.items()}
    columns["weight/policy"] = changed(weights, [1.0] * size)
    columns["advantage"] = changed(advantages, _weights(batch, splice, advantages))
    rollouts = [
        rollout if cut is None else _spliced(rollout, *cut) for rollout, cut in zip(batch.rollouts, cuts, strict=True)
    ]
    return Batch(rollouts, batch.columns, columns)


def _cut(rollout: Rollout, splice: SpliceConfig, policy: Policy) -> tuple[int, list[int]] | None:
    """The number of tokens before the answer, and the ids that are put after them."""
    if rollout.task.answer is None:
        return None
    if rollout.char_ends is None:
        rollout.char_ends = char_ends(policy.tokenizer, rollout)
    place = tokens_before_answer(rollout, splice.opening)
    if place is None:
        return None
    put = encoded(policy, with_answer(splice.text, rollout.task.answer))
    return place, put if place + len(put) <= policy.context else []


def _weights(batch: Batch, splice: SpliceConfig, advantages: list[np.ndarray]) -> list[float]:
    """[B]: the weight of the tokens of each response's answer."""
    if splice.by == "one":
        return [1.0] * len(batch)
    if splice.by == "reward":
        return [float(reward) for reward in batch.column("reward")]
    # Of the last token that the policy sampled: modifiers may have given each token its own.
    return [
        float(own[np.flatnonzero(rollout.sampled)[-1]]) for rollout, own in zip(batch.rollouts, advantages, strict=True)
    ]


def _spliced(rollout: Rollout, place: int, put: list[int]) -> Rollout:
    count = len(put)
    return dataclasses.replace(
        rollout,
        token_ids=np.append(rollout.token_ids[:place], np.asarray(put, dtype=np.int64)),
        origin=np.append(rollout.origin[:place], np.full(count, Origin.HINT, dtype=np.int8)),
        # Unknown, so that a ratio to the behaviour policy is refused and not made up.
        behaviour_logprobs=np.append(rollout.behaviour_logprobs[:place], np.full(count, np.nan, dtype=np.float32)),
        # -1: no weights sampled them.
        policy_version=np.append(rollout.policy_version[:place], np.full(count, -1, dtype=np.int32)),
        char_ends=None
        if rollout.char_ends is None
        else np.append(rollout.char_ends[:place], np.full(count, -1, dtype=np.int64)),
    )
