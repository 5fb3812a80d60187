r"""Numbers as written: decimals, repeating decimals, mixed numbers, spaced thousands, bases."""

from __future__ import annotations

import re
from fractions import Fraction

from rlvr.verifiers.math.expression import Apply, Bracket, Node, Number
from rlvr.verifiers.math.math_tokens import Token, UnreadableError
from rlvr.verifiers.math.numeric import decimal_places
from rlvr.verifiers.math.reader import Reader

_THOUSAND = re.compile(r"\d{3}(?:\.\d*)?")


class Literals(Reader):
    """The part of the parser for literals."""

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


def _mixed(whole: Fraction, top: int, bottom: int) -> Node:
    return Apply("mixed", (Number(whole), Apply("/", (Number(Fraction(top)), Number(Fraction(bottom))))))
