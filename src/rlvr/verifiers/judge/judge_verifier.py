"""The verifier `judge`: a language model decides whether a response is right, or how good it is.

The question, reference answer and response in one message, and a verdict of one word, are the form of
PrimeIntellect-ai/verifiers (verifiers/v1/judges/reference.txt at a60a606e) and of verl's example of a generative reward
model (verl-project/verl, tests/experimental/reward_loop/reward_fn.py at b178a3cd, a number from 1 to 10, where a reply
without one counts 0; here it is undecided).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.judge.asks_judge import AsksJudge
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.fenced_prompt import JudgeTemplate
from rlvr.verifiers.judge.readings import (
    JsonReader,
    JudgeReading,
    LabelReader,
    NumberReader,
    ProbabilityReader,
    VerdictReader,
)

TEMPLATE = """Decide whether the response answers the question correctly. The reference answer is correct; where it \
has several lines, each is. The response has to agree with it in substance, in whatever words.

Question:
{prompt}

Reference answer:
{answer}

Response:
{response}"""
Rule = Literal["majority", "any", "all", "mean"]


@register_verifier("judge")
@dataclass
class JudgeVerifier(AsksJudge):
    """A language model's verdict, or the vote of several of its verdicts.

    What keeps the judge from a verdict (no connection, a refusal, a reply that cannot be read, a number out of range,
    the deadline) leaves it undecided.
    """

    template: str = TEMPLATE
    """The request, with `{prompt}`, `{response}`, `{answer}`, and fields of `info` by their names. Each stands between
    lines with a code that the response cannot know."""
    read: Literal["label", "number", "json", "probability"] = "label"
    """The form of the verdict: one of `labels`; a number from `low` to `high`; `json_field` of a JSON object, which is
    a number, a truth value or a label; the probability of each of `labels` as the reply's first token."""
    labels: dict[str, float] = field(default_factory=lambda: {"yes": 1.0, "no": 0.0})
    """Label -> score."""
    low: float = 0.0
    """The number that is worth 0."""
    high: float = 10.0
    """The number that is worth 1."""
    json_field: str = "score"
    """The key of the JSON object."""
    schema: dict[str, Any] | None = None
    """A JSON schema for `read: json`, which the endpoint is asked to keep to and the object must fit."""
    least_mass: float = 0.5
    """With `read: probability` the least probability of all labels together."""
    rule: Rule = "majority"
    """One score of several votes. majority: the most frequent, the lower one of two; any: the best; all: the worst;
    mean: their mean, of at least half of them. Votes that are missing leave it undecided where they could decide."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._template = JudgeTemplate(self.template, longest=self.longest)
        self._reader = self._make_reader()
        if self.read == "probability" and self.votes > 1:
            raise ConfigError("judge: the probability of a token is the same for every vote: set votes to 1")

    def check_task(self, task: Task) -> str | None:
        return super().check_task(task) or self._template.problem(task)

    async def verify(self, task: Task, completion: str) -> Verdict:
        votes = await self.readings(
            lambda code: self._template.filled(task, {"response": completion}, code), self._reader
        )
        score = voted(votes, self.rule, self._reader)
        if isinstance(score, JudgeError):
            return self.undecided(score)
        said = [vote for vote in votes if isinstance(vote, JudgeReading)]
        answer = min(said, key=lambda vote: abs(vote.score - score)).text
        agreeing = sum(vote.score == score for vote in said) / len(said)
        reason = "the judge says " + ", ".join(vote.text for vote in said)
        return Verdict.from_score(score, reason=reason, answer=answer, scores={"agreement": agreeing})

    def _make_reader(self) -> VerdictReader:
        match self.read:
            case "label":
                return LabelReader(self.labels, self.coded)
            case "number":
                return NumberReader(self.low, self.high, self.coded)
            case "json":
                return JsonReader(self.json_field, self.low, self.high, self.labels, self.schema, self.coded)
            case "probability":
                return ProbabilityReader(self.labels, self.least_mass, self.coded)


def voted(votes: Sequence[JudgeReading | JudgeError], rule: Rule, reader: VerdictReader) -> float | JudgeError:
    """The score of several votes, or the error of the first that is missing where the missing could decide."""
    scores = [vote.score for vote in votes if isinstance(vote, JudgeReading)]
    errors = [vote for vote in votes if isinstance(vote, JudgeError)]
    if not scores:
        return errors[0]
    match rule:
        case "any":
            return errors[0] if errors and max(scores) < reader.best else max(scores)
        case "all":
            return errors[0] if errors and min(scores) > reader.worst else min(scores)
        case "mean":
            return errors[0] if 2 * len(scores) < len(votes) else sum(scores) / len(scores)
        case "majority":
            counts = Counter(scores)
            # Of two as frequent ones the lower: a split judge pays nobody.
            first, *others = sorted(counts, key=lambda score: (-counts[score], score))
            behind = counts[others[0]] if others else 0
            decided = not errors or counts[first] > behind + len(errors)
            return first if decided else errors[0]
