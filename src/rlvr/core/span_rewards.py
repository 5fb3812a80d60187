"""The result of a reward term that scores parts of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlvr.core.splitters import tokens_of
from rlvr.records import Batch, SpanScores


@dataclass(frozen=True)
class SpanRewards:
    """Scores of parts of responses: what a reward term may return in the place of one number per response.

    Advantages find them in `Rollout.spans`, losses in the token column `span/NAME`. An undecided span (NaN) has no
    credit and stays out of every mean; it leaves the response decided.
    """

    spans: Sequence[SpanScores]
    """One for each rollout of the batch, in order."""
    responses: np.ndarray | None = None
    """float64 [B]: numbers that go into the rewards of the responses, as those of any term, NaN undecided; None: the
    term scores parts alone, and the column `reward/NAME` shows their sum, which `reward` leaves out."""

    @classmethod
    def of_turns(
        cls, batch: Batch, scores: Sequence[Sequence[float] | np.ndarray], responses: np.ndarray | None = None
    ) -> SpanRewards:
        """One number for each turn of the policy in each rollout, from the first on; further ones are left out."""
        spans = []
        for rollout, own in zip(batch.rollouts, scores, strict=True):
            pairs = [(turn, score) for turn, score in zip(rollout.turns, own, strict=False) if turn.end > turn.start]
            spans.append(span_scores([(turn.start, turn.end) for turn, _ in pairs], [score for _, score in pairs]))
        return cls(spans, responses)

    @classmethod
    def of_tokens(cls, batch: Batch, scores: Sequence[np.ndarray], responses: np.ndarray | None = None) -> SpanRewards:
        """One number for each token that the policy wrote; `scores` are [T_b]."""
        spans = []
        for rollout, own in zip(batch.rollouts, scores, strict=True):
            places = np.flatnonzero(rollout.sampled)
            spans.append(SpanScores(places, places + 1, np.asarray(own, dtype=np.float64)[places]))
        return cls(spans, responses)

    @classmethod
    def of_characters(
        cls, batch: Batch, spans: Sequence[Sequence[tuple[int, int, float]]], responses: np.ndarray | None = None
    ) -> SpanRewards:
        """Of spans (first character, past-the-end character, score) of each rollout's text. The term sets
        `reads_characters`."""
        scored = [
            span_scores(tokens_of(rollout, [(start, end) for start, end, _ in own]), [score for *_, score in own])
            for rollout, own in zip(batch.rollouts, spans, strict=True)
        ]
        return cls(scored, responses)

    @property
    def column(self) -> np.ndarray:
        """float64 [B]: the numbers of the responses, or the sums of their decided spans; NaN where all are
        undecided."""
        if self.responses is not None:
            return self.responses
        sums = [np.nan if len(one) and np.isnan(one.score).all() else float(np.nansum(one.score)) for one in self.spans]
        return np.asarray(sums, dtype=np.float64)

    def scaled(self, factor: float) -> SpanRewards:
        """All scores times a factor; 0 where it is 0, undecided ones or not."""
        return self._each(lambda values: factor * values if factor else np.zeros(len(values)))

    def finite(self) -> SpanRewards:
        """The scores as float64, those that are infinite as undecided."""
        return self._each(lambda values: np.where(np.isfinite(values), values, np.nan))

    def _each(self, change: Callable[[np.ndarray], np.ndarray]) -> SpanRewards:
        spans = [replace(one, score=change(np.asarray(one.score, dtype=np.float64))) for one in self.spans]
        responses = None if self.responses is None else change(np.asarray(self.responses, dtype=np.float64))
        return SpanRewards(spans, responses)


def span_scores(spans: Sequence[tuple[int, int]], scores: Sequence[float] | np.ndarray) -> SpanScores:
    """The scores of spans (first token, past-the-end token) of a rollout."""
    starts, ends = np.asarray(spans, dtype=np.int64).reshape(-1, 2).T
    return SpanScores(starts, ends, np.asarray(scores, dtype=np.float64))
