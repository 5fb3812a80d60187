"""A token put after every response, for a loss that reads its log-prob there; the policy did not sample it."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlvr.errors import ConfigError
from rlvr.losses import Objective
from rlvr.policy import Policy
from rlvr.records import Batch, Origin, Rollout


def token_after(objective: Objective, policy: Policy) -> int | None:
    """The id of the token that a component wants after responses; None where none does. ConfigError where it is no
    token, or where two components want different ones."""
    wanted = {c.name: c.loss.appends for c in objective.components if c.loss.appends is not None}
    if len(set(wanted.values())) > 1:
        raise ConfigError(
            f"algorithm.auxiliary: {' and '.join(wanted)} put different tokens after a response: give them the same"
        )
    for name, text in wanted.items():
        ids = policy.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"algorithm.auxiliary: the token {text!r} of {name!r} is {len(ids)} tokens of the model's tokenizer: "
                "name one that it has, a special token that no response needs"
            )
        return int(ids[0])
    return None


def filler(name: str) -> float:
    """The value in the column `name` of tokens and rollouts that nobody sampled: 0 where it is multiplied or summed,
    else NaN, which says that nothing is known of them."""
    if name in ("advantage", "penalty") or name.startswith(("weight/", "advantage/")):
        return 0.0
    return np.nan


def with_token(batch: Batch, token: int, context: int) -> Batch:
    """The batch with `token` after each response that ended by itself and leaves room for it; its origin is HINT, and
    it has 0 in every token column of weights and advantages, NaN elsewhere."""
    # bool [B]. A truncated response did not come to the place where the token is asked for.
    on = [not r.stop.truncated and 0 < len(r) < context for r in batch.rollouts]

    def more(name: str, values: np.ndarray) -> np.ndarray:
        # In the column's own type: a Python float would make float64 of float32.
        return np.append(values, values.dtype.type(filler(name)))

    return Batch(
        [_longer(r, token) if longer else r for r, longer in zip(batch.rollouts, on, strict=True)],
        batch.columns,
        {
            name: [more(name, values) if longer else values for values, longer in zip(column, on, strict=True)]
            for name, column in batch.token_columns.items()
        },
    )


def _longer(rollout: Rollout, token: int) -> Rollout:
    return dataclasses.replace(
        rollout,
        token_ids=np.append(rollout.token_ids, token),
        origin=np.append(rollout.origin, np.int8(Origin.HINT)),
        behaviour_logprobs=np.append(rollout.behaviour_logprobs, np.float32(np.nan)),
        # -1: no weights sampled it.
        policy_version=np.append(rollout.policy_version, np.int32(-1)),
        char_ends=None if rollout.char_ends is None else np.append(rollout.char_ends, -1),
    )
