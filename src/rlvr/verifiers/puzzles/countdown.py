"""Countdown, the 24 game and similar puzzles: an expression over the given numbers that reaches a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, bare, unparsable, wrong
from rlvr.verifiers.puzzles.expressions import Expression, read_expression


@register_verifier("countdown")
@dataclass
class CountdownVerifier(AnswerVerifier):
    """The answer is an expression of + - * / and brackets over the numbers of `info["numbers"]` that equals the target.

    The target is `info["target"]`, else `task.answer`, else the option. The value is exact. Signs, powers, decimals and
    numbers glued together are no expressions; `= target` may follow.
    """

    target: int | None = None
    """The target of tasks that bring none: 24 for the 24 game."""
    use: Literal["all", "any"] = "all"
    """Each number exactly once, or at most once."""
    operators: str = "+-*/"
    """The operators allowed."""
    wrong_value_score: float = 0.0
    """Score of an expression that keeps the rules and misses the target (0.1 in TinyZero)."""

    def __post_init__(self) -> None:
        if not self.operators or set(self.operators) - set("+-*/"):
            raise ConfigError(f"countdown: operators={self.operators!r} are not some of + - * /")
        if not 0 <= self.wrong_value_score < 1:
            raise ConfigError(f"countdown: wrong_value_score={self.wrong_value_score} is not in [0, 1)")

    def check_task(self, task: Task) -> str | None:
        numbers = task.info.get("numbers")
        target = self._target(task)
        if (
            not isinstance(numbers, Sequence)
            or not numbers
            or any(type(n) is not int or not 0 <= n < 10**18 for n in numbers)
        ):
            return f'info["numbers"]={numbers!r} is no list of whole numbers'
        if target is not None:
            return None
        return "the target (info, answer or option) is not a number"

    def judge(self, task: Task, answer: str) -> Verdict:
        target = self._target(task)
        assert target is not None
        # `6 * 7 = 42`: the expression, and what it claims to be.
        text, equals, right = bare(answer).strip(" .").partition("=")
        expression = read_expression(text)
        if isinstance(expression, str):
            return unparsable(expression, answer)
        claimed = read_expression(right) if equals else None
        # `6 * 7 = 40 + 2` is refused: the right side would be a second answer.
        if equals and not (isinstance(claimed, Expression) and not claimed.operators):
            return unparsable("what follows the = is not one number", answer)
        reason = self._broken_rule(expression, task.info["numbers"])
        if reason:
            return wrong(reason, answer)
        if isinstance(claimed, Expression) and claimed.value != target:
            return wrong(f"it claims to be {claimed.value}", answer)
        if expression.value == target:
            return Verdict(VerdictStatus.CORRECT, 1.0, answer=answer)
        size = max(abs(expression.value.numerator), expression.value.denominator)
        reason = f"its value is {expression.value if size < 10**12 else 'far off'}"
        return Verdict.from_score(self.wrong_value_score, answer=answer, reason=reason)

    def same_answer(self, first: str, second: str) -> bool:
        """Return True if two expressions have the same value."""
        one, other = (read_expression(bare(text).partition("=")[0]) for text in (first, second))
        if isinstance(one, str) or isinstance(other, str):
            return first.split() == second.split()
        return one.value == other.value

    def _target(self, task: Task) -> Fraction | None:
        for value in (task.info.get("target"), task.answer, self.target):
            if value is not None:
                return _number(value)
        return None

    def _broken_rule(self, expression: Expression, available: Sequence[int]) -> str:
        # Multisets: each given number may be used as often as it is given.
        used = Counter(expression.numbers)
        have = Counter(available)
        if used - have:
            return f"{_listed(used - have)} not among the numbers left"
        if self.use == "all" and used != have:
            return f"{_listed(have - used)} not used"
        forbidden = expression.operators - set(self.operators)
        if forbidden:
            return f"operator {', '.join(sorted(forbidden))} is not allowed"
        return ""


def _number(value: Any) -> Fraction | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        # `Fraction("1e999999999")` would compute ten to that power.
        if len(str(value)) <= 40:
            return Fraction(value)
        return None
    except (ValueError, OverflowError, ZeroDivisionError):
        return None


def _listed(numbers: Counter[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers.elements()))
