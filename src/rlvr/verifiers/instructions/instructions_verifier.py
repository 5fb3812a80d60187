"""The verifier for instruction following: which of a task's instructions a response follows.

Invariants: a response without a letter or digit follows nothing, so that silence never earns the constraints that
forbid; every instruction is checked on the text after the reasoning, as a reader sees it (without zero-width
characters, `&nbsp;`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import after_reasoning
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.instructions.instruction_registry import Instruction, read_instructions
from rlvr.verifiers.invisible import visible


@register_verifier("instructions")
@dataclass
class InstructionsVerifier(Verifier):
    """The response follows the instructions of the task: the 25 kinds of IFEval (arXiv 2311.07911).

    `task.info` holds `instruction_id_list` and `kwargs`, as in the public data. Score: 1 when all are followed, else 0;
    with `aggregate: mean` the share that is followed. `Verdict.scores` has 1 or 0 for each instruction, by its id
    (`id#2` when the id comes again).
    """

    aggregate: Literal["all", "mean"] = "all"
    """`all`: every instruction must be followed (prompt-level accuracy); `mean`: the share of them
    (instruction-level)."""
    evaluation: Literal["strict", "loose"] = "strict"
    """`loose` takes an instruction as followed when one of 8 variants of the text follows it: without its first line,
    its last line, both, and each without asterisks (IFEval, section 2.2). For evaluation: in training it pays for
    more."""
    think_opened_by_prompt: bool = False
    """The prompt's template ends in `<think>`: a completion without `</think>` has no answer yet."""

    def verify(self, task: Task, completion: str) -> Verdict:
        try:
            instructions = read_instructions(task.info)
        except ValueError as error:
            return Verdict.undecided(f"bad task: {error}")
        text = after_reasoning(completion, self.think_opened_by_prompt)
        if text is None:
            return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason="the reasoning never ended")
        text = visible(text)
        texts = [text]
        if self.evaluation == "loose":
            texts = loose_variants(text)
        # A text without a letter or digit follows nothing, or silence would earn "no comma".
        followed = self._followed(instructions, [variant for variant in texts if any(map(str.isalnum, variant))])
        share = sum(followed.values()) / len(followed)
        broken = [name for name, follows in followed.items() if not follows]
        score = float(not broken)
        if self.aggregate == "mean":
            score = share
        reason = f"not followed: {', '.join(broken)}" if broken else ""
        return Verdict.from_score(score, reason=reason, scores={name: float(f) for name, f in followed.items()})

    def check_task(self, task: Task) -> str | None:
        try:
            read_instructions(task.info)
        except ValueError as error:
            return str(error)
        return None

    def _followed(self, instructions: list[Instruction], texts: list[str]) -> dict[str, bool]:
        followed: dict[str, bool] = {}
        for instruction in instructions:
            name = instruction.id
            again = 1
            # IFEval may ask for the same kind twice with other arguments.
            while name in followed:
                again += 1
                name = f"{instruction.id}#{again}"
            followed[name] = any(instruction.follows(text) for text in texts)
        return followed


def loose_variants(text: str) -> list[str]:
    """The 8 variants of IFEval's loose evaluation, without repetitions."""
    lines = text.split("\n")
    # IFEval, section 2.2: the text, without its first line, without its last, without both; each also without
    # asterisks.
    cuts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cuts, *(cut.replace("*", "") for cut in cuts)]))
