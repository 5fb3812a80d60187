"""The verifier `steps`: a language model judges each step of a response, for credit by spans.

Invariant: each step stands in a fence of its own, so that no step can pretend to be two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlvr.core.splitters import Split
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.judge.asks_judge import AsksJudge
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.fenced_prompt import JudgeTemplate
from rlvr.verifiers.judge.judge_verifier import voted
from rlvr.verifiers.judge.numbered_reader import NumberedReader, of_number
from rlvr.verifiers.judge.readings import LabelReader
from rlvr.verifiers.scored_steps import fused_scores, splitter_of_text

TEMPLATE = """Decide for each step of the solution whether it is right, given the steps before it. A step that builds \
on a wrong one is wrong.

Problem:
{prompt}

Solution:
{step}"""
# A choice: more are joined with the last one, since a judge that labels hundreds of steps leaves some out.
MOST_STEPS = 50
"""Most steps of a response."""
Score = Literal["mean", "min", "last", "before_error"]


@register_verifier("steps")
@dataclass
class StepsVerifier(AsksJudge):
    """The steps of a response, each with the score of the label that a language model gives it.

    `Verdict.spans` has each step's characters and score, which the advantage `spans` turns into credit of its tokens;
    `Verdict.scores` has `mean`, `min`, `last`, `before_error`, the share of steps before the first of the least score,
    and `steps`, their number. Several votes are counted for each step by itself. A response without any text scores the
    least label.
    """

    split: Split = "blank_line"
    """The border of two steps: `blank_line`, `line`, `sentence`, a regular expression that matches what
    stands between two, or a list of texts with which steps begin."""
    labels: dict[str, float] = field(default_factory=lambda: {"right": 1.0, "wrong": 0.0})
    """Label -> score of a step."""
    score: Score = "before_error"
    """The verdict's own score, of those above."""
    template: str = TEMPLATE
    """The request, with `{step}` (all steps, each in a fence of its own), `{prompt}`, `{answer}` and fields of
    `info`."""

    gives_spans = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._template = JudgeTemplate(self.template, ("step",), self.longest)
        LabelReader(self.labels)
        self._splitter = splitter_of_text("steps", self.split, MOST_STEPS)

    def check_task(self, task: Task) -> str | None:
        return super().check_task(task) or self._template.problem(task)

    async def verify(self, task: Task, completion: str) -> Verdict:
        spans = self._splitter.of_text(completion)
        if not spans:
            lowest = min(self.labels.values())
            return Verdict(VerdictStatus.UNPARSABLE, lowest, reason="the response has no step")
        given = {"step": [completion[start:end] for start, end in spans]}
        reader = NumberedReader("steps", len(spans), "steps", self.labels, self.coded)
        votes = await self.readings(lambda code: self._template.filled(task, given, code), reader)
        scores: list[float] = []
        for number in range(1, len(spans) + 1):
            said = voted([of_number(vote, number) for vote in votes], "majority", reader)
            if isinstance(said, JudgeError):
                return self.undecided(said)
            scores.append(said)
        fused = fused_scores(scores, [score == reader.worst for score in scores])
        wrong = [str(number) for number, score in enumerate(scores, start=1) if score == reader.worst]
        return Verdict.from_score(
            fused[self.score],
            reason=f"{len(scores)} steps; wrong: {', '.join(wrong) or 'none'}",
            scores=fused,
            spans=[(start, end, score) for (start, end), score in zip(spans, scores, strict=True)],
        )
