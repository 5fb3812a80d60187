"""The verifier `scorer`: the score that a frozen model gives a response.

A reward model of Bradley-Terry form has one output, the logit of `AutoModelForSequenceClassification` on the chat with
the response, as the model cards of Skywork-Reward-V2 and of others say. The score of a response less that of a
reference response is the centred reward of PAR (Fu et al. 2025, arXiv 2502.18770, section 4), before its sigmoid, which
`activation` does not apply: the reward term `bounded` bounds it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.undecided_counts import UndecidedCounts
from rlvr.verifiers.run_models import RunModels
from rlvr.verifiers.scorer.model_scores import (
    Activation,
    Form,
    Kind,
    ModelScore,
    ModelScores,
    RecentValues,
    ScoreOptions,
    ServedScores,
    model_scores,
)
from rlvr.verifiers.scorer.scored_texts import (
    Part,
    check_template,
    missing_field,
    part_of,
    pattern_within,
    reference_of,
)

# The scorer's own deadline is to strike first: it knows why, and counts it.
GRACE = 10.0
"""Seconds that the time limit is above the deadline."""


@register_verifier("scorer")
@dataclass
class ScorerVerifier(Verifier):
    """The score that a frozen model of the section `models` gives a response: a reward model, for example.

    The responses of a group are scored together, on rank 0. What keeps the model from a score (a response longer than
    its context, a server that fails) leaves the response undecided. `Verdict.scores` has the model's other outputs by
    name, and with `against` also `response` and `reference`.
    """

    model: str
    """The model's name in `models`, with a `path` to load it from, or the `url` of vLLM's server (`--runner
    pooling`)."""
    kind: Kind = "classifier"
    """classifier: an output of a sequence classifier, such as a reward model. embedding: the cosine of the embeddings
    of response and reference. yes_no: the mean score of `labels`, weighted with their probabilities as the next token
    after a question. likelihood: the mean log-prob of a text's tokens. A server has the first two."""
    part: Part = "answer"
    """The part of the response that is scored: what follows its thinking, the thinking, or all."""
    within: str = ""
    """A regular expression whose group is scored in the place of the part, such as `<answer>(.*?)</answer>`: that of
    its first match, where `.` is any character. A part without a match is scored whole."""
    against: Literal["none", "reference", "demonstration"] = "none"
    """The score is the difference to that of the task's `answer`, or of its `demonstration`, which is computed once.
    With `embedding`, and `likelihood` of the reference, it names the text that is compared with instead, and none
    stands for reference."""
    form: Form = "auto"
    """The form of the model's input. chat: the prompt and the response by the chat template of the model's tokenizer.
    pair: both as two texts. text: `template`. auto: text where there is a template, else chat where there is a chat
    template (and at a server), else pair."""
    template: str = ""
    """Text with `{response}`, `{prompt}`, `{answer}`, `{demonstration}` and fields of `info`: all of what is shown with
    `form: text`, the question of `yes_no`, or what stands between prompt and reference for `likelihood`."""
    label: str | int | None = None
    """The classifier's output that is the score, by name or number; null where it has one. A server tells no names."""
    activation: Activation = "none"
    """none: the logit itself. sigmoid, softmax: a number from 0 to 1."""
    labels: dict[str, float] = field(default_factory=lambda: {"yes": 1.0, "no": 0.0})
    """Tokens of `yes_no` -> score."""
    least_mass: float = 0.01
    """The least probability of all `labels` together."""
    pooling: Literal["mean", "last", "cls"] = "mean"
    """The embedding: the mean of the last hidden states of all tokens, or that of the last or the first one. A server
    has a pooling of its own."""
    of: Literal["reference", "response"] = "reference"
    """The text whose likelihood is meant: of the reference after the response, or of the response after the prompt."""
    think_opened_by_prompt: bool = False
    """The prompt ends inside the thinking, so that a response begins there."""
    deadline: float = 300.0
    """Seconds for a response, or for those of a group at a model that is loaded, with the wait for others before it.
    `verification.time_limit` must not be lower."""
    concurrency: int = 64
    """Requests to a server under way at a time."""
    retries: int = 4
    """Further attempts at a request, as of the verifier `judge`."""
    timeout: float = 60.0
    """Seconds for one attempt."""
    hedge: float | None = 1.5
    """As of the verifier `judge`."""

    needs = Needs(remote=True)

    def __post_init__(self) -> None:
        if not self.deadline > 0 or not 0 < self.least_mass <= 1:
            raise ConfigError("scorer: deadline must be above 0, and least_mass above 0 and at most 1")
        if not self.labels or not all(math.isfinite(score) for score in self.labels.values()):
            raise ConfigError("scorer: labels are tokens with finite scores, at least one")
        if self.template and (self.kind != "likelihood" or self.of == "reference"):
            check_template("scorer", self.template)
        self._within = pattern_within(self.within) if self.within else None
        if self.against != "none" and self.kind == "likelihood" and self.of == "response":
            raise ConfigError("scorer: against goes with likelihood of the reference, not of the response")
        self.time_limit = self.deadline + GRACE
        self._scores: ModelScores | None = None
        self._references: RecentValues[ModelScore | JudgeError] = RecentValues()
        self._undecided = UndecidedCounts()
        self._scored = 0
        self._seconds = 0.0

    @property
    def _compares(self) -> bool:
        """True if the model itself compares a response with a reference."""
        return self.kind == "embedding" or (self.kind == "likelihood" and self.of == "reference")

    @property
    def _reference(self) -> str:
        return "demonstration" if self.against == "demonstration" else "reference"

    def attach(self, models: RunModels) -> None:
        """Load the model, or find its server. ConfigError where it does not fit the options."""
        options = ScoreOptions(
            self.kind,
            self.form,
            self.template,
            self.label,
            self.activation,
            self.labels,
            self.least_mass,
            self.pooling,
            self.of,
            self._reference,
        )
        client = {
            "concurrency": self.concurrency,
            "retries": self.retries,
            "timeout": self.timeout,
            "hedge": self.hedge,
        }
        self._scores = model_scores(options, models, self.model, self.deadline, client)

    def check_task(self, task: Task) -> str | None:
        compared = self._compares or self.against != "none"
        if compared and reference_of(task, self._reference) is None:
            which = "demonstration" if self._reference == "demonstration" else "answer"
            return f"the task has no {which} to compare with"
        return missing_field(self.template, task)

    async def verify(self, task: Task, completion: str) -> Verdict:
        return (await self.verify_group(task, [completion]))[0]

    async def verify_group(self, task: Task, completions: Sequence[str]) -> list[Verdict]:  # type: ignore[override]
        """The verdicts on the responses of a group, in their order."""
        if self._scores is None:
            raise ConfigError(f"scorer: models.{self.model} was not loaded: call `attach` with the models of a run")
        start = time.perf_counter()
        texts = [part_of(one, self.part, self.think_opened_by_prompt, self._within) for one in completions]
        reference: ModelScore | JudgeError | None = None
        if self.against != "none" and not self._compares:
            reference = await self._reference_score(self._scores, task)
        scores = await self._scores.score(task, texts)
        self._scored += len(texts)
        self._seconds += time.perf_counter() - start
        return [self._verdict(score, reference) for score in scores]

    def metrics(self) -> dict[str, float]:
        scored, self._scored = self._scored, 0
        seconds, self._seconds = self._seconds, 0.0
        counts = {
            "scored": float(scored),
            "seconds": seconds,
            **self._undecided.take(),
        }
        if isinstance(self._scores, ServedScores):
            usage = self._scores.client.take_usage()
            counts |= {"requests": usage.requests, "failed": usage.failed, "hedged": usage.hedged}
        return counts

    async def _reference_score(self, scores: ModelScores, task: Task) -> ModelScore | JudgeError:
        text = str(reference_of(task, self._reference))
        # The prompt is part of what is shown, and with a template `info` may be.
        key = repr((task.prompt, task.answer, text, sorted(task.info.items()) if self.template else ()))
        kept = self._references.get(key)
        if kept is None:
            (kept,) = await scores.score(task, [text])
            # A server that failed may answer the next time.
            if isinstance(kept, ModelScore) or kept.cause == "too_long":
                self._references.put(key, kept)
        return kept

    def _verdict(self, score: ModelScore | JudgeError, reference: ModelScore | JudgeError | None) -> Verdict:
        for one in (score, reference):
            if isinstance(one, JudgeError):
                return self._undecided.verdict(one)
        assert isinstance(score, ModelScore)
        value = score.score
        named = {name: one for name, one in score.named.items() if math.isfinite(one)}
        if isinstance(reference, ModelScore):
            named |= {"response": score.score, "reference": reference.score}
            value = score.score - reference.score
        if not math.isfinite(value):
            return self._undecided.verdict(JudgeError("out_of_range", f"the model gives {value}"))
        return Verdict.from_score(value, reason=f"the model gives {value:.4g}", scores=named)
