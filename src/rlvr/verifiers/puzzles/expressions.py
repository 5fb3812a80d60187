"""A tiny language: whole numbers, + - * /, brackets. Read and computed exactly, with nothing evaluated by Python.

Invariants: linear in the text, without recursion; a sign is no operand, so `-3`, `2^9`, `2!`, `1.5` and `2(3)` are no
expressions; no number has more than 18 digits, so nothing grows beyond what the length of the text allows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Arbitrary: countdown gives 3 to 6 numbers.
MAX_NUMBERS = 100
"""Numbers in one expression; a longer one is refused, since its exact value may have as many digits as the text."""

_SPELLINGS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*", "\u2217": "*", "\u00f7": "/",
    "\u2215": "/", "\u2044": "/",
    "\\times": "*", "\\cdot": "*", "\\ast": "*", "\\div": "/", "[": "(", "]": ")", "\\{": "(", "\\}": ")",
}  # fmt: skip
_SPELLING = re.compile("|".join(re.escape(written) for written in sorted(_SPELLINGS, key=len, reverse=True)))
# Matches `\frac{1}{2}`, `\dfrac{a}{b}` without braces inside.
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
# A whole number without leading zeros and of at most 18 digits, or an operator: `007` and `1.5` are refused.
_TOKEN = re.compile(r"\s*(?:(0|[1-9][0-9]{0,17})(?![0-9])|([-+*/()]))")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True)
class Expression:
    """The value of an expression and the numbers that it uses."""

    value: Fraction
    numbers: tuple[int, ...]
    operators: frozenset[str]


def read_expression(text: str) -> Expression | str:
    """The expression that `text` writes, in plain characters or simple LaTeX; else in words why it is none."""
    tokens = _tokens(text)
    if isinstance(tokens, str):
        return tokens
    numbers = tuple(token for token in tokens if isinstance(token, int))
    if len(numbers) > MAX_NUMBERS:
        return f"more than {MAX_NUMBERS} numbers"
    try:
        value = _value(tokens)
    except ZeroDivisionError:
        return "a division by zero"
    if value is None:
        return "not an expression of numbers, + - * / and brackets"
    return Expression(value, numbers, frozenset(token for token in tokens if isinstance(token, str) and token in _RANK))


def _tokens(text: str) -> list[int | str] | str:
    # Fractions in fractions, from the inside out, to a depth of three.
    for _ in range(3):
        text, replaced = _FRACTION.subn(r"((\1)/(\2))", text)
        if not replaced:
            break
    text = _SPELLING.sub(lambda match: f" {_SPELLINGS[match[0]]} ", text).rstrip()
    tokens: list[int | str] = []
    end = 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            return f"{text[end : end + 20].strip()!r} is no number, operator or bracket"
        tokens.append(int(match[1]) if match[1] else match[2])
        end = match.end()
    return tokens


def _value(tokens: list[int | str]) -> Fraction | None:
    """Dijkstra's shunting yard; None where the tokens are no expression."""
    values: list[Fraction] = []
    waiting: list[str] = []
    operand_next = True
    for token in tokens:
        if isinstance(token, int) or token == "(":
            if not operand_next:
                return None
            if isinstance(token, int):
                values.append(Fraction(token))
                operand_next = False
            else:
                waiting.append(token)
            continue
        if operand_next:
            return None
        # Operators that bind as strongly or more are computed first, so that `8 - 3 - 2` is 3.
        while waiting and waiting[-1] != "(" and (token == ")" or _RANK[waiting[-1]] >= _RANK[token]):
            _apply(waiting.pop(), values)
        if token != ")":
            waiting.append(token)
            operand_next = True
        elif waiting:
            waiting.pop()
        else:
            return None
    if operand_next or "(" in waiting:
        return None
    while waiting:
        _apply(waiting.pop(), values)
    return values[0]


def _apply(operator: str, values: list[Fraction]) -> None:
    right = values.pop()
    left = values.pop()
    if operator == "+":
        values.append(left + right)
    elif operator == "-":
        values.append(left - right)
    else:
        values.append(left * right if operator == "*" else left / right)
