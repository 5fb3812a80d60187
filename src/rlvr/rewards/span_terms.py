"""Terms that score parts of responses, for the advantage `spans` and for losses that read `span/NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlvr.components import RewardContext, RewardTerm
from rlvr.config import Config
from rlvr.core.span_rewards import SpanRewards
from rlvr.records import Batch
from rlvr.registry import register
from rlvr.rewards.composition import Terms
from rlvr.rewards.terms import VerdictScore


@register("reward", "verdict_spans")
@dataclass(frozen=True)
class VerdictSpans(RewardTerm):
    """The scores that a verdict gives to spans of the text (`Verdict.spans`): those of the verifiers `steps` and
    `step_scorer`, and of your own.

    So they pass through gates, weights, sources and schedules, and those of several verifiers are several streams. The
    verdict's own score counts for the response with `responses`.
    """

    verifier: str | None = None
    """The verifier whose verdict is taken, as of the term `verdict`."""
    responses: bool = False
    """Give the response the verdict's score, beside its spans."""
    reads_characters: ClassVar = True

    def check_config(self, config: Config) -> None:
        """ConfigError for a slip in a verifier's name, as by the term `verdict`."""
        VerdictScore(verifier=self.verifier).check_config(config)

    def bind(self, setting: RewardContext) -> RewardTerm:
        """ConfigError for a name under which no rollout has a verdict, as by the term `verdict`, and for a verifier
        that gives no spans."""
        VerdictScore(verifier=self.verifier).bind(setting)
        setting.check_spans("rewards: the term 'verdict_spans'", self.verifier)
        return self

    def __call__(self, batch: Batch, *_: Any, **given: Any) -> SpanRewards:
        verdicts = [r.verdict if self.verifier is None else r.verdicts.get(self.verifier) for r in batch.rollouts]
        spans = [() if verdict is None else verdict.spans for verdict in verdicts]
        responses = VerdictScore(verifier=self.verifier)(batch) if self.responses else None
        return SpanRewards.of_characters(batch, spans, responses)


@register("reward", "turns")
@dataclass(frozen=True)
class TurnRewards(RewardTerm):
    """One number for each turn of the policy: the values of terms, the first for turn 1, and so on.

    `terms: [{name: verdict, verifier: turn 1}, {name: verdict, verifier: turn 2}]` after `rollout.plan` `turns` with
    `judge: each` pays each turn for its own answer. Turns beyond the terms have no span.
    """

    terms: Terms = ("verdict",)
    """The terms, one for each turn in order."""
    inner: ClassVar = ("terms",)

    def __call__(self, batch: Batch, terms: list[np.ndarray]) -> SpanRewards:
        # [terms, B] -> [B, terms]
        return SpanRewards.of_turns(batch, list(np.stack(terms, axis=1)))
