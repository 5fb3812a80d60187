"""A cursor over tokens, and the state that the parts of the parser share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rlvr.verifiers.math.expression import Node
from rlvr.verifiers.math.math_tokens import END, Token, UnreadableError


class Reader(ABC):
    """Reads tokens one by one; the parser proper (parser.py, commands.py) builds on it."""

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
