"""Values of terms that score parts of responses, and of terms that are made of such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlvr.components import RewardTerm
from rlvr.core.span_rewards import SpanRewards
from rlvr.errors import ConfigError
from rlvr.records import Batch, SpanScores

TermValues = np.ndarray | SpanRewards
"""The values of a term: float64 [B], or scores of parts."""


def noted(values: SpanRewards, name: str, batch: Batch) -> SpanRewards:
    """The values with what is infinite as undecided, after they were put into the column `reward/NAME` and, as the
    spans NAME, into the rollouts. ConfigError where they do not fit the batch."""
    if len(values.spans) != len(batch):
        raise ConfigError(f"reward {name!r} returned spans of {len(values.spans)} rollouts for {len(batch)}")
    if values.responses is not None and np.shape(values.responses) != (len(batch),):
        raise ConfigError(
            f"reward {name!r} returned responses of shape {np.shape(values.responses)} for {len(batch)} rollouts: one "
            "number each is needed"
        )
    values = values.finite()
    for rollout, scores in zip(batch.rollouts, values.spans, strict=True):
        if len(scores) and int(scores.end.max()) > len(rollout):
            raise ConfigError(
                f"reward {name!r} scored tokens up to {int(scores.end.max())} of rollout {rollout.id}, which has "
                f"{len(rollout)}"
            )
        # A term that stands in two places is evaluated twice, and keeps the weight of the one that is paid.
        before = rollout.spans.get(name)
        rollout.spans[name] = scores if before is None else replace(scores, weight=before.weight)
    batch.columns[f"reward/{name}"] = values.column
    return values


def on_spans(
    function: RewardTerm, name: str, batch: Batch, held: Mapping[str, TermValues | list[TermValues]]
) -> TermValues:
    """The values of a term that is made of others, of which some score parts.

    A term that goes element by element is called for the spans as it is for responses: what scores responses counts the
    same for all spans of a response. Another one takes the numbers of the responses. ConfigError where there are none,
    or where two terms score other parts.
    """
    flat = [one for value in held.values() for one in (value if isinstance(value, list) else [value])]
    scored = [one for one in flat if isinstance(one, SpanRewards)]
    responses: np.ndarray | None = None
    if all(one.responses is not None for one in scored):
        of_responses = _each(held, lambda one: one.responses if isinstance(one, SpanRewards) else one)
        responses = np.asarray(function(batch, **of_responses), dtype=np.float64)
    if not function.by_element:
        if responses is None:
            raise ConfigError(
                f"rewards: {name!r} takes one number per response, and a term that it is made of scores parts of "
                "responses alone"
            )
        return responses
    spans = scored[0].spans
    for other in scored[1:]:
        if any(
            not (np.array_equal(a.start, b.start) and np.array_equal(a.end, b.end))
            for a, b in zip(spans, other.spans, strict=True)
        ):
            raise ConfigError(f"rewards: {name!r} is made of two terms that score different parts of the responses")
    sizes = np.asarray([len(one) for one in spans], dtype=np.int64)
    # int64 [N]: the rollout of each span; the batch of spans has the rollout once for each.
    index = np.repeat(np.arange(len(batch)), sizes)

    def spread(one: TermValues) -> np.ndarray:
        if isinstance(one, SpanRewards):
            return np.concatenate([np.empty(0), *(scores.score for scores in one.spans)])
        return one[index]

    values = np.asarray(function(batch.select(index), **_each(held, spread)), dtype=np.float64)
    ends = np.cumsum(sizes)
    return SpanRewards(
        [
            SpanScores(one.start, one.end, values[end - size : end])
            for one, size, end in zip(spans, sizes, ends, strict=True)
        ],
        responses,
    )


def _each(held: Mapping[str, Any], change: Callable[[TermValues], Any]) -> dict[str, Any]:
    return {name: [change(one) for one in v] if isinstance(v, list) else change(v) for name, v in held.items()}
