"""A cursor over tokens with the state that the parts of the parser share, and the literals among the tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction

from rlvr.verifiers.math.math_tokens import END, Token, UnreadableError
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Node, Number
from rlvr.verifiers.math.numeric import decimal_places

# Deeper than any answer; the parser recurses a few Python frames for each level, far below the interpreter's limit of
# 1,000.
MAX_DEPTH = 40
"""Levels of brackets, fractions, roots and powers in each other."""

_THOUSAND = re.compile(r"\d{3}(?:\.\d*)?")


class Reader(ABC):
    """Reads tokens one by one; the parser proper (commands.py, parser.py) builds on it."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.level = 0
        self.bars = 0
        self.integrals: list[dict[str, str | int]] = []

    def peek(self, ahead: int = 0) -> Token:
        place = self.at + ahead
        if place < len(self.tokens):
            return self.tokens[place]
        return END

    def next(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def accept(self, kind: str, text: str = "") -> bool:
        token = self.peek()
        if token.kind != kind or (text and token.text != text):
            return False
        self.at += 1
        return True

    def expect(self, kind: str, text: str = "") -> None:
        if not self.accept(kind, text):
            raise UnreadableError(f"expected {text or kind} before {self.peek().text!r}")

    def _subscript(self) -> str:
        """The text of a subscript, written without spaces and braces."""
        self.expect("operator", "_")
        if not self.accept("open", "group"):
            return self.next().text
        open_braces = 1
        parts = []
        while open_braces:
            token = self.next()
            if token is END:
                raise UnreadableError("a subscript that does not close")
            if token.text == "group":
                open_braces += {"open": 1, "close": -1}.get(token.kind, 0)
            if token.text != "group":
                parts.append(token.text)
        return "".join(parts)

    def _name(self, name: str) -> str:
        primes = ""
        while self.peek().text in ("_", "'"):
            if self.peek().text == "_":
                name += "_" + self._subscript()
            else:
                self.next()
                primes += "'"
        return name + primes

    def _inside(self, read: Callable[[], Node], bars_open: int = 0) -> Node:
        """Return the result of `read` in brackets of its own; with -1 bars open a bar is the `such that` of a set."""
        bars = self.bars
        self.bars = bars_open
        node = read()
        self.bars = bars
        return node

    def ends(self) -> bool:
        """Return True if nothing more can stand in this list: the end, a closing bracket, the end of an environment."""
        kind, text, _ = self.peek()
        return kind in ("end", "close") or (kind == "environment" and text.startswith("end"))

    # numbers as written: decimals, repeating decimals, mixed numbers, spaced thousands, bases

    def number(self, token: Token) -> Node:
        value = Fraction(token.text.rstrip("."))
        if self.peek().text in ("overline", "bar") and "." in token.text and self.peek(1).text == "group":
            cycle = self.peek(2)
            if cycle.kind == "number" and cycle.text.isdecimal() and self.peek(3).text == "group":
                self.at += 4
                places = len(token.text.partition(".")[2])
                return Number(value + Fraction(int(cycle.text), (10 ** len(cycle.text) - 1) * 10**places))
        if self.peek().text == "_" and token.text.isdecimal():
            base = self._subscript()
            if base.isdecimal() and 2 <= int(base) <= 36 and all(int(digit) < int(base) for digit in token.text):
                return Number(Fraction(int(token.text, int(base))), int(base))
            raise UnreadableError("a number with an index")
        decimals = decimal_places(token.text)
        if decimals is None and value.denominator == 1:
            return self._joined(value)
        return Number(value, places=decimals)

    def _based(self, node: Node) -> Node:
        """A number in brackets with its base behind them, `(1011)_2`; anything else as it is."""
        match node:
            case Bracket("(", ")", (Number(value, 0),)) if self.peek().text == "_" and value.denominator == 1:
                return self.number(Token("number", str(value)))
        return node

    def _joined(self, value: Fraction) -> Node:
        """An integer with what belongs to it: a fraction (`1 1/2`, `1\\frac{1}{2}`) or more digits (`4 200`)."""
        while self.peek().kind == "number" and self.peek().spaced:
            token = self.peek()
            bar = self.peek(1)
            below = self.peek(2)
            if (
                token.text.isdecimal()
                and bar.text == "/"
                and below.text.isdecimal()
                and int(token.text) < int(below.text)
            ):
                self.at += 3
                return _mixed(value, int(token.text), int(below.text))
            if value <= 0 or value.denominator != 1 or not _THOUSAND.fullmatch(token.text):
                raise UnreadableError("two numbers side by side")
            self.next()
            value = value * 1000 + Fraction(token.text)
        parts = self._fraction_ahead()
        if parts is None:
            return Number(value)
        self.at += parts[2]
        return _mixed(value, parts[0], parts[1])

    def _fraction_ahead(self) -> tuple[int, int, int] | None:
        r"""Top, bottom and tokens of a proper fraction of integers that follows: `\frac{1}{2}`, `\frac12`."""
        if self.peek().text != "frac":
            return None
        shape = [(self.peek(k).kind, self.peek(k).text) for k in range(1, 7)]
        if shape[0] == ("open", "group") == shape[3] and shape[2] == ("close", "group") == shape[5]:
            top = shape[1][1]
            bottom = shape[4][1]
            count = 7
        elif shape[0][0] == "number" and len(shape[0][1]) == 2:
            top = shape[0][1][0]
            bottom = shape[0][1][1]
            count = 2
        else:
            return None
        if not (top.isdecimal() and bottom.isdecimal() and 0 < int(top) < int(bottom)):
            return None
        return int(top), int(bottom), count

    # what the parser above this class reads

    @abstractmethod
    def listing(self) -> Node:
        """Items up to a closing token."""

    @abstractmethod
    def statement(self) -> Node:
        """One item: a chain of relations, or an expression."""

    @abstractmethod
    def atom(self) -> Node:
        """One operand."""

    @abstractmethod
    def expression(self, power: int) -> Node:
        """An expression of operators that bind at least as tight as `power`."""

    @abstractmethod
    def exponent(self) -> Node:
        """Return the argument of `^` or `_`."""


def _mixed(whole: Fraction, top: int, bottom: int) -> Node:
    return Apply("mixed", (Number(whole), Apply("/", (Number(Fraction(top)), Number(Fraction(bottom))))))
