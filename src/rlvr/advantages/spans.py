"""Per-token advantages from scores of parts of a response: turns, steps, sentences.

A response is a row of steps, each with a score at its end and a number of tokens before that end; a token's advantage
is what is still to come. Invariants: tokens that the policy did not write have 0; undecided responses have 0 and stay
out of every mean; a response without a scored span is one step of reward 0, whatever the transforms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr.advantages.group import FlatTokens, decided, group_advantage
from rlvr.components import Advantage
from rlvr.core.schedules import Scalar
from rlvr.records import Batch, Rollout
from rlvr.registry import register

Transform = Literal["clip", "delta"]


@register("advantage", "spans")
@dataclass(frozen=True)
class SpanAdvantage(Advantage):
    """Returns to go of the scores that the verdict gives to spans of the text (`Verdict.spans`).

    A token of step k has the sum over steps j >= k of discount^(j - k) r_j, plus, with outcome `apart`, the response's
    own advantage. outcome `apart`, normalise `std`: GRPO with process supervision (Shao et al. 2024, section 4.1.3).
    outcome `last`, normalise `std`, discount below 1: IGPO (Wang et al. 2025, arXiv 2510.14967; from memory, its text
    could not be read). transform [clip, delta]: "On designing effective RL reward at training time" (Gao et al. 2024,
    arXiv 2410.15115; from memory likewise). Without any span it is the advantage `group` on every token.
    """

    kind: str | None = None
    """Segments of this kind (turn, step, think ...) are the steps, each with the sum of the scores that end in it;
    null: every scored span is a step."""
    transform: tuple[Transform, ...] = ()
    """In order: clip, min(score - threshold, 0), so that a further step never pays; delta, score minus that of the next
    step, the last one keeping its own, so that the sum from any step on is that step's score."""
    threshold: Scalar = 0.0
    """The value that clip subtracts."""
    discount: Scalar = 1.0
    """Weight of the next step's reward against this one's, 0 to 1."""
    weight: Scalar = 1.0
    """Factor of the scores."""
    outcome: Literal["apart", "last", "none"] = "apart"
    """The use of the response's reward. apart: normalised by itself and given to all tokens; last: added to the last
    step's score; none: left out."""
    normalise: Literal["std", "mean", "none"] = "std"
    """Within a group, over all steps of all responses (and over the outcomes): minus the mean, over the standard
    deviation; minus the mean; as they are."""
    epsilon: float = 1e-4
    """Added to a standard deviation."""

    per_token = True
    reads_characters = True

    @property
    def smallest_group(self) -> int:
        """The smallest group in which the estimator gives an advantage other than 0."""
        return 1 if self.normalise == "none" else 2

    def __call__(self, batch: Batch) -> list[np.ndarray]:
        on = decided(batch)
        groups = batch.group_index()
        tokens = FlatTokens.of(batch)
        rewards = np.where(on, batch.column("reward"), np.nan)
        scored_steps = {i: s for i in np.flatnonzero(on) if (s := _steps(batch.rollouts[i], self.kind)) is not None}
        # [B]: steps of each response; one without scored spans is one step of reward 0.
        count = np.ones(len(batch), dtype=np.int64)
        count[list(scored_steps)] = [len(scores) for scores, _ in scored_steps.values()]
        first = np.cumsum(count) - count
        scores = np.zeros(int(count.sum()))
        # [N]: the step that each token leads to, numbered within its response.
        step = np.zeros(len(tokens.sampled), dtype=np.int64)
        ends = np.cumsum(tokens.sizes)
        for i, (step_scores, step_of_token) in scored_steps.items():
            scores[first[i] : first[i] + count[i]] = self._transformed(step_scores)
            step[ends[i] - tokens.sizes[i] : ends[i]] = step_of_token
        owner = np.repeat(np.arange(len(batch)), count)
        if self.outcome == "last":
            # The last step of each response; NaN where undecided, which the next line makes of all of its steps.
            scores[first + count - 1] += rewards
        # float64 [steps of all responses]: normalised over all steps of the group, as process supervision in GRPO is.
        normal = self._normalised(np.where(on[owner], scores, np.nan), groups[owner])
        if self.outcome == "apart":
            outcome = self._normalised(rewards, groups)
        else:
            outcome = np.zeros(len(batch))
        # The appended 0 is what tokens after the last step get.
        to_go = np.append(_returns(normal, first, count, float(self.discount)), 0.0)
        of = tokens.rollout
        at = np.where(step < count[of], first[of] + step, len(normal))  # past the last step nothing is to come
        return tokens.split(np.where(tokens.sampled & on[of], to_go[at] + outcome[of], 0.0))

    def _transformed(self, scores: np.ndarray) -> np.ndarray:
        for transform in self.transform:
            if transform == "clip":
                scores = np.minimum(scores - float(self.threshold), 0.0)
            else:
                # r_k - r_(k+1): the sum from step k to the end telescopes to r_k.
                scores = scores - np.append(scores[1:], 0.0)
        return float(self.weight) * scores

    def _normalised(self, values: np.ndarray, groups: np.ndarray) -> np.ndarray:
        baseline, scale = {"std": ("mean", "std"), "mean": ("mean", "none"), "none": ("none", "none")}[self.normalise]
        return group_advantage(values, groups, baseline, scale, self.epsilon)  # type: ignore[arg-type]


def _steps(rollout: Rollout, kind: str | None) -> tuple[np.ndarray, np.ndarray] | None:
    """The scores of the steps, float64 [K], at least one, and the step that each token leads to, int64 [T], K after the
    end of the last one; None where no span is scored."""
    verdict = rollout.verdict
    if verdict:
        spans = [s for s in verdict.spans if math.isfinite(s[2])]
    else:
        spans = []
    if not spans:
        return None
    lasts = _last_tokens(rollout, [end for _, end, _ in spans])
    scores = np.asarray([s[2] for s in spans])
    if kind is None:
        order = np.argsort(lasts, kind="stable")
        lasts = lasts[order]
        scores = scores[order]
    else:
        # Each segment of the kind is a step; a span belongs to the first one that does not end before the span does,
        # and a span after the last segment to that.
        # int64 [K]: the last token of each segment of the kind.
        ends = sorted(s.end - 1 for s in rollout.segments if s.kind == kind and s.end > s.start)
        if not ends:
            return None
        step = np.minimum(np.searchsorted(ends, lasts), len(ends) - 1)
        lasts = np.asarray(ends, dtype=np.int64)
        # Summed, since several spans may belong to one segment.
        scores = np.bincount(step, scores, minlength=len(ends))
    return scores, np.searchsorted(lasts, np.arange(len(rollout)))


def _last_tokens(rollout: Rollout, ends: Sequence[int]) -> np.ndarray:
    """The tokens that complete the text up to each of the characters `ends`; the last sampled one where nothing says
    which."""
    written = rollout.sampled.nonzero()[0]
    last = int(written[-1]) if len(written) else len(rollout) - 1
    if rollout.char_ends is None:
        return np.full(len(ends), last)
    # char_ends is -1 outside the completion; the running maximum makes it sorted, which searchsorted needs.
    return np.minimum(np.maximum.accumulate(rollout.char_ends).searchsorted(ends), last)


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
