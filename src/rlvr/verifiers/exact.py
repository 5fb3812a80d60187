"""The smallest built-in verifier: the completion is the answer, letter by letter."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.extraction import after_reasoning


@register_verifier("exact")
@dataclass
class ExactVerifier(Verifier):
    """The text after the reasoning block, stripped of surrounding space, equals `task.answer`."""

    casefold: bool = False
    """Ignore case."""

    def quick(self, task: Task, completion: str) -> Verdict:
        if task.answer is None:
            return Verdict.undecided("bad gold: the task has no answer")
        text = after_reasoning(completion)
        if text is None:
            return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason="the reasoning never ended")
        answer = text.strip()
        return Verdict.from_score(self.same_answer(answer, str(task.answer)), answer=answer)

    def verify(self, task: Task, completion: str) -> Verdict:
        return self.quick(task, completion)

    def check_task(self, task: Task) -> str | None:
        return "the task has no answer" if task.answer is None else None

    def same_answer(self, first: str, second: str) -> bool:
        first, second = first.strip(), second.strip()
        return first.casefold() == second.casefold() if self.casefold else first == second
