"""Per-token advantages from scores of parts of a response: turns, steps, sentences, tokens.

A stream is a row of spans in each response, each with a score: those of the verdict, or of a reward term. The advantage
is the sum of the streams' credit and of the response's own advantage. Invariants: tokens that the policy did not write
have 0; undecided responses have 0 and stay out of every mean; so do undecided spans, and their tokens have no credit of
that stream; the order of rollouts changes nothing. Of the verdict, a response without a scored span is one step of
reward 0, whatever the transforms; of a term it has no credit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict

from rlvr.advantages.group import FlatTokens, check_terms, decided, group_advantage
from rlvr.components import Advantage
from rlvr.config import Config
from rlvr.core.schedules import Scalar
from rlvr.core.span_rewards import span_scores
from rlvr.core.splitters import tokens_of
from rlvr.records import Batch, Rollout, SpanScores, Task
from rlvr.registry import register

Transform = Literal["clip", "delta"]
Credit = Literal["to_go", "own", "block"]
Normalise = Literal["std", "mean", "leave_one_out", "none"]
_NORMALISED = {
    "std": ("mean", "std"),
    "mean": ("mean", "none"),
    "leave_one_out": ("leave_one_out", "none"),
    "none": ("none", "none"),
}
"""normalise -> baseline and scale of `group_advantage`."""


@dataclass(frozen=True)
class SpanStream:
    """The credit of one reward term in the advantage `spans`. What is null is as the advantage's option of that name
    says. ValueError for a discount that is none."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False)

    weight: float = 1.0
    """Factor of the credit, after scores were normalised. The term's own weight multiplies it."""
    credit: Credit | None = None
    discount: float | None = None
    per: Literal["step", "token"] | None = None
    normalise: Normalise | None = None
    among: Literal["group", "place"] | None = None
    kind: str | None = None
    transform: tuple[Transform, ...] | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.discount is not None and not 0 <= self.discount <= 1:
            raise ValueError(f"discount is {self.discount}, and must be from 0 to 1")


def _with_options(written: Any) -> Any:
    """A weight alone as a stream of that weight."""
    if isinstance(written, int | float):
        return {"weight": written}
    return written


@register("advantage", "spans")
@dataclass(frozen=True)
class SpanAdvantage(Advantage):
    """Credit of the scores of spans: those that the verdict gives (`Verdict.spans`), or those of reward terms.

    By default a token of step k has the sum over steps j >= k of discount^(j - k) r_j, plus, with outcome `apart`, the
    response's own advantage. outcome `apart`, normalise `std`: GRPO with process supervision (Shao et al. 2024, section
    4.1.3). outcome `last`, normalise `std`, discount below 1: IGPO (Wang et al. 2025, arXiv 2510.14967; from memory,
    its text could not be read). transform [clip, delta]: "On designing effective RL reward at training time" (Gao et
    al. 2024, arXiv 2410.15115; from memory likewise). Without any span of the verdict it is the advantage `group` on
    every token, and so it is with one span over the whole response whose score is the reward, and outcome `none`.

    `terms: {NAME: 1.0, OTHER: {weight: 0.5, credit: own, discount: 0.99}}` adds up several streams, one for each term.
    """

    terms: dict[str, Annotated[SpanStream | float, BeforeValidator(_with_options)]] | None = None
    """Reward terms that score spans, each with the weight of its credit, or with options of its own beside `weight`:
    credit, discount, per, normalise, among, kind, transform, threshold. null: the verdict's spans."""
    credit: Credit = "to_go"
    """to_go: a token has the discounted sum from its step on; own: the scores of the spans that it is in, and no other;
    block: all tokens of a segment of `kind` (null: of the response) have the sum of the spans that end in it."""
    kind: str | None = None
    """Segments of this kind (turn, step, think ...) are the steps, each with the sum of the scores that end in it;
    null: every scored span is a step. With credit `block` spans are normalised before they are summed."""
    transform: tuple[Transform, ...] = ()
    """In order: clip, min(score - threshold, 0), so that a further step never pays; delta, score minus that of the next
    step, the last one keeping its own, so that the sum from any step on is that step's score."""
    threshold: Scalar = 0.0
    """The value that clip subtracts."""
    discount: Scalar = 1.0
    """Weight of the next step's reward against this one's, 0 to 1."""
    per: Literal["step", "token"] = "step"
    """The distance that discount counts: steps, or tokens that the policy wrote, to the last one of a step."""
    weight: Scalar = 1.0
    """Factor of the scores."""
    outcome: Literal["apart", "last", "none"] = "apart"
    """The use of the response's reward. apart: normalised by itself and given to all tokens; last: added to the last
    step's score; none: left out."""
    normalise: Normalise = "std"
    """Within a group, over all steps of all responses (and over the outcomes): minus the mean, over the standard
    deviation; minus the mean; minus the mean of the others; as they are."""
    among: Literal["group", "place"] = "group"
    """The steps that are normalised together: all of the group, or those of the group that have the same number in
    their responses (the second turns, say)."""
    epsilon: float = 1e-4
    """Added to a standard deviation."""

    per_token = True

    def __post_init__(self) -> None:
        if self.terms is None:
            return
        if not self.terms:
            raise ValueError("terms is empty: name a reward term that scores spans, or leave it out")
        if self.outcome == "last" and len(self.terms) > 1:
            raise ValueError("outcome last adds the reward to the last step of one stream, and terms names several")

    @property
    def reads_characters(self) -> bool:
        """True where the verdict's spans are read."""
        return self.terms is None

    @property
    def reads_verdict_spans(self) -> bool:
        """True where no `terms` give the spans."""
        return self.terms is None

    @property
    def smallest_group(self) -> int:
        """The smallest group in which the estimator gives an advantage other than 0."""
        used = [stream.normalise for stream in self._streams.values()]
        if self.outcome == "apart":
            used.append(self.normalise)
        return 1 if "none" in used else 2

    def check(self, config: Config, tasks: Sequence[Task]) -> None:
        """ConfigError where there is no such reward."""
        check_terms(self.terms or (), [term.column for term in config.rewards], "spans reads the term")

    @property
    def _streams(self) -> dict[str | None, SpanAdvantage]:
        """The term's name (None: the verdict) -> the options of its stream."""
        if self.terms is None:
            return {None: self}
        streams: dict[str | None, SpanAdvantage] = {}
        for name, written in self.terms.items():
            own = written if isinstance(written, SpanStream) else SpanStream(weight=written)
            # `weight` of the advantage is a factor of the scores, that of a stream one of the credit.
            options = {key: value for key, value in vars(own).items() if value is not None and key != "weight"}
            streams[name] = dataclasses.replace(self, terms=None, **options)
        return streams

    def __call__(self, batch: Batch) -> list[np.ndarray]:
        on = decided(batch)
        tokens = FlatTokens.of(batch)
        groups = batch.group_index()
        rewards = np.where(on, batch.column("reward"), np.nan)
        live = tokens.sampled & on[tokens.rollout]
        result = np.zeros(len(live))
        for name, stream in self._streams.items():
            steps = _Steps.of(batch, on, name, stream)
            credit = stream._credit(batch, steps, rewards, groups, tokens)
            if name is None or self.terms is None:
                result += credit
            else:
                written = self.terms[name]
                weight = written.weight if isinstance(written, SpanStream) else written
                result += weight * steps.weight[tokens.rollout] * credit
        if self.outcome == "apart":
            result += self._normalised(rewards, groups)[tokens.rollout]
        return tokens.split(np.where(live, result, 0.0))

    def _credit(
        self, batch: Batch, steps: _Steps, rewards: np.ndarray, groups: np.ndarray, tokens: FlatTokens
    ) -> np.ndarray:
        """float64 [N]: the credit of one stream at every token; what the policy did not write is left to the caller."""
        scores = steps.scores.copy()
        last = steps.first + steps.count - 1
        for i in np.flatnonzero(steps.count):
            scores[steps.first[i] : last[i] + 1] = self._transformed(scores[steps.first[i] : last[i] + 1])
        if self.outcome == "last":
            # NaN where undecided, which leaves the last step of such a response out of the mean.
            some = steps.count > 0
            scores[last[some]] += rewards[some]
        scores[~np.isfinite(rewards)[steps.owner]] = np.nan
        together = groups[steps.owner]
        if self.among == "place":
            place = np.arange(len(scores)) - steps.first[steps.owner]
            # A group for each place of each group: numbers need not be dense for `unique` to make them so.
            together = np.unique(together * (int(place.max(initial=0)) + 1) + place, return_inverse=True)[1]
        # float64 [steps of all responses]: normalised over all steps of the group, as process supervision in GRPO is.
        normal = self._normalised(scores, together)
        starts = np.cumsum(tokens.sizes) - tokens.sizes
        if self.credit == "to_go":
            credit = self._to_go(normal, steps, tokens, starts)
        else:
            credit = np.zeros(len(tokens.sampled))
            begin, end = (starts[steps.owner] + one for one in (steps.start, steps.end))
            if self.credit == "block":
                begin, end = self._blocks(batch, steps, starts)
            # Added one by one, since spans may overlap: 0 + x is x to the last bit.
            np.add.at(credit, _ranges(begin, end), np.repeat(normal, end - begin))
        # The tokens of undecided steps of decided responses: they learn nothing from this stream.
        masked = np.isnan(scores) & np.isfinite(rewards)[steps.owner]
        offset = starts[steps.owner[masked]]
        credit[_ranges(offset + steps.start[masked], offset + steps.end[masked])] = 0.0
        return credit

    def _to_go(self, normal: np.ndarray, steps: _Steps, tokens: FlatTokens, starts: np.ndarray) -> np.ndarray:
        """float64 [N]: the discounted sums of the steps that end at a token or after it."""
        discount = float(self.discount)
        if self.per == "token":
            # Each step's score at the last token of the policy's within or before it, and a step for each such token.
            places = np.flatnonzero(tokens.sampled)
            lengths = np.bincount(tokens.rollout[places], minlength=len(tokens.sizes))
            first = np.cumsum(lengths) - lengths
            at = places.searchsorted(starts[steps.owner] + steps.end) - 1
            inside = at >= first[steps.owner]
            rewards = np.zeros(len(places))
            np.add.at(rewards, at[inside], normal[inside])
            result = np.zeros(len(tokens.sampled))
            result[places] = _returns(rewards, first, lengths, discount)
            return result
        # The appended 0 is what tokens after the last step get.
        to_go = np.append(_returns(normal, steps.first, steps.count, discount), 0.0)
        # [N]: the step that each token leads to, numbered within its response.
        step = np.zeros(len(tokens.sampled), dtype=np.int64)
        for i in np.flatnonzero(steps.count):
            ends = steps.end[steps.first[i] : steps.first[i] + steps.count[i]]
            size = int(tokens.sizes[i])
            step[starts[i] : starts[i] + size] = ends.searchsorted(np.arange(size), "right")
        of = tokens.rollout
        return to_go[np.where(step < steps.count[of], steps.first[of] + step, len(normal))]

    def _blocks(self, batch: Batch, steps: _Steps, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that share the credit of each step: (first, past the end) among all tokens, int64 [steps]."""
        begin = np.zeros(len(steps.owner), dtype=np.int64)
        end = np.zeros(len(steps.owner), dtype=np.int64)
        for i in np.flatnonzero(steps.count):
            own = slice(int(steps.first[i]), int(steps.first[i] + steps.count[i]))
            rollout = batch.rollouts[i]
            edges = [(0, len(rollout))]
            if self.kind is not None:
                edges = _segments(rollout, self.kind) or edges
            ends = np.asarray([past for _, past in edges])
            block = np.minimum(ends.searchsorted(steps.end[own]), len(edges) - 1)
            begin[own] = starts[i] + np.asarray([first for first, _ in edges])[block]
            end[own] = starts[i] + ends[block]
        return begin, end

    def _transformed(self, scores: np.ndarray) -> np.ndarray:
        for transform in self.transform:
            if transform == "clip":
                scores = np.minimum(scores - float(self.threshold), 0.0)
            else:
                # r_k - r_(k+1): the sum from step k to the end telescopes to r_k.
                scores = scores - np.append(scores[1:], 0.0)
        return float(self.weight) * scores

    def _normalised(self, values: np.ndarray, groups: np.ndarray) -> np.ndarray:
        baseline, scale = _NORMALISED[self.normalise]
        return group_advantage(values, groups, baseline, scale, self.epsilon)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Steps:
    """The steps of all responses of a batch, one response after the other, each in the order of their ends."""

    first: np.ndarray
    """int64 [B], the first step of each response"""
    count: np.ndarray
    """int64 [B]"""
    owner: np.ndarray
    """int64 [steps], the response of each"""
    start: np.ndarray
    """int64 [steps], the first token within the response"""
    end: np.ndarray
    """int64 [steps], past the last token"""
    scores: np.ndarray
    """float64 [steps], NaN undecided"""
    weight: np.ndarray
    """float64 [B], of the term"""

    @classmethod
    def of(cls, batch: Batch, on: np.ndarray, term: str | None, stream: SpanAdvantage) -> _Steps:
        """The steps of a stream in the responses that are `on`, bool [B]."""
        spans = [
            _spans(rollout, term, stream) if is_on else None for rollout, is_on in zip(batch.rollouts, on, strict=True)
        ]
        weight = np.asarray([1.0 if one is None else one.weight for one in spans])
        if term is None or stream.outcome == "last":
            # One step of score 0 over all of a response that has none.
            spans = [
                span_scores([(0, len(rollout))], [0.0]) if one is None or not len(one) else one
                for rollout, one in zip(batch.rollouts, spans, strict=True)
            ]
        given = [one if one is not None else _NO_SPANS for one in spans]
        count = np.asarray([len(one) for one in given], dtype=np.int64)
        return cls(
            first=np.cumsum(count) - count,
            count=count,
            owner=np.repeat(np.arange(len(batch)), count),
            start=np.concatenate([_NO_SPANS.start, *(one.start for one in given)]),
            end=np.concatenate([_NO_SPANS.end, *(one.end for one in given)]),
            scores=np.concatenate([_NO_SPANS.score, *(one.score for one in given)]),
            weight=weight,
        )


_NO_SPANS = span_scores([], [])


def _spans(rollout: Rollout, term: str | None, stream: SpanAdvantage) -> SpanScores | None:
    """The steps of one response in the order of their ends; None where no span is scored."""
    if term is not None:
        scores = rollout.spans.get(term, _NO_SPANS)
    else:
        verdict = rollout.verdict
        given = [s for s in verdict.spans if math.isfinite(s[2])] if verdict else []
        scores = span_scores(tokens_of(rollout, [(start, end) for start, end, _ in given]), [s for *_, s in given])
    if not len(scores):
        return None
    if stream.kind is None or stream.credit == "block":
        order = np.argsort(scores.end, kind="stable")
        return SpanScores(scores.start[order], scores.end[order], scores.score[order], scores.weight)
    # Each segment of the kind is a step; a span belongs to the first one that does not end before the span does, and a
    # span after the last segment to that.
    edges = _segments(rollout, stream.kind)
    if not edges:
        return None
    starts, ends = np.asarray(edges, dtype=np.int64).T
    step = np.minimum(ends.searchsorted(scores.end), len(ends) - 1)
    # Summed, since several spans may belong to one segment; an undecided one leaves the segment undecided.
    return SpanScores(starts, ends, np.bincount(step, scores.score, minlength=len(ends)), scores.weight)


def _segments(rollout: Rollout, kind: str) -> list[tuple[int, int]]:
    """The segments of a kind that have tokens, in order."""
    return sorted((s.start, s.end) for s in rollout.segments if s.kind == kind and s.end > s.start)


def _ranges(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The numbers from begin to before end of each pair, one pair after the other."""
    sizes = end - begin
    offsets = np.repeat(begin - (np.cumsum(sizes) - sizes), sizes)
    return offsets + np.arange(int(sizes.sum()))


def _returns(rewards: np.ndarray, first: np.ndarray, count: np.ndarray, discount: float) -> np.ndarray:
    """The discounted sums from each step on; the steps of a response are `first` and the `count` - 1 after it."""
    result = rewards.copy()
    longer = np.arange(len(first))
    for k in range(2, int(count.max(initial=0)) + 1):
        longer = longer[count[longer] >= k]
        # The k-th step from the end of every response that has as many: G_j = r_j + discount G_(j+1), all responses at
        # once.
        at = first[longer] + count[longer] - k
        result[at] += discount * result[at + 1]
    return result
