"""The verifier `steps`: a language model judges each step of a response, for credit by spans.

Invariant: each step stands in a fence of its own, so that no step can pretend to be two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.judge.asks_judge import AsksJudge
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.fenced_prompt import JudgeTemplate
from rlvr.verifiers.judge.judge_verifier import voted
from rlvr.verifiers.judge.numbered_reader import NumberedReader, of_number
from rlvr.verifiers.judge.readings import LabelReader

TEMPLATE = """Decide for each step of the solution whether it is right, given the steps before it. A step that builds \
on a wrong one is wrong.

Problem:
{prompt}

Solution:
{step}"""
SPLITS = {"blank_line": r"\n[ \t]*\n\s*", "line": r"\n\s*"}
"""Name -> what stands between two steps."""
# A choice: more are joined with the last one, since a judge that labels hundreds of steps leaves some out.
MOST_STEPS = 50
"""Most steps of a response."""
Score = Literal["mean", "min", "last", "before_error"]


@register_verifier("steps")
@dataclass
class StepsVerifier(AsksJudge):
    """The steps of a response, each with the score of the label that a language model gives it.

    `Verdict.spans` has each step's characters and score, which the advantage `spans` turns into credit of its tokens;
    `Verdict.scores` has `mean`, `min`, `last` and `before_error`, the share of steps before the first of the least
    score. Several votes are counted for each step by itself. A response without any text scores the least label.
    """

    split: str = "blank_line"
    """The border of two steps: `blank_line`, `line`, or a regular expression that matches what stands between them."""
    labels: dict[str, float] = field(default_factory=lambda: {"right": 1.0, "wrong": 0.0})
    """Label -> score of a step."""
    score: Score = "before_error"
    """The verdict's own score, of those above."""
    template: str = TEMPLATE
    """The request, with `{step}` (all steps, each in a fence of its own), `{prompt}`, `{answer}` and fields of
    `info`."""
    coded: bool = True
    """As of the verifier `judge`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._template = JudgeTemplate(self.template, ("step",), self.longest)
        LabelReader(self.labels)
        try:
            self._border = re.compile(SPLITS.get(self.split, self.split))
        except re.error as error:
            raise ConfigError(
                f"steps: split={self.split!r} is neither {', '.join(SPLITS)} nor a pattern: {error}"
            ) from error

    def check_task(self, task: Task) -> str | None:
        return super().check_task(task) or self._template.problem(task)

    async def verify(self, task: Task, completion: str) -> Verdict:
        spans = steps_of(completion, self._border)
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
        fused = fused_scores(scores, reader.worst)
        wrong = [str(number) for number, score in enumerate(scores, start=1) if score == reader.worst]
        return Verdict.from_score(
            fused[self.score],
            reason=f"{len(scores)} steps; wrong: {', '.join(wrong) or 'none'}",
            scores=fused,
            spans=[(start, end, score) for (start, end), score in zip(spans, scores, strict=True)],
        )


def steps_of(text: str, border: re.Pattern[str]) -> list[tuple[int, int]]:
    """(first character, past-the-end character) of each step that is not blank, at most `MOST_STEPS`; what is beyond
    belongs to the last."""
    # A border of no characters would stand between any two of them.
    borders = [(match.start(), match.end()) for match in border.finditer(text) if match.end() > match.start()]
    starts = [0, *(end for _, end in borders)]
    ends = [*(start for start, _ in borders), len(text)]
    spans = [(start, end) for start, end in zip(starts, ends, strict=True) if text[start:end].strip()]
    if len(spans) > MOST_STEPS:
        spans[MOST_STEPS - 1 :] = [(spans[MOST_STEPS - 1][0], spans[-1][1])]
    return spans


def fused_scores(scores: Sequence[float], worst: float) -> dict[str, float]:
    """The scores of a response by those of its steps, at least one."""
    before = next((place for place, score in enumerate(scores) if score == worst), len(scores))
    return {
        "mean": sum(scores) / len(scores),
        "min": min(scores),
        "last": scores[-1],
        "before_error": before / len(scores),
    }
