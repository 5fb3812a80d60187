r"""Parsing of what stands behind an operand: `!`, `%`, primes, degrees, powers, transposes; and of exponents."""

from __future__ import annotations

from fractions import Fraction

from rlvr.verifiers.math.commands import Commands
from rlvr.verifiers.math.declarations import is_number_set
from rlvr.verifiers.math.expression import Apply, Bracket, Matrix, Node, Number, Symbol
from rlvr.verifiers.math.math_tokens import Token, UnreadableError

# Deeper than any answer; the parser recurses a few Python frames for each level, far below the interpreter's limit of
# 1,000.
MAX_DEPTH = 40
"""Levels of brackets, fractions, roots and powers in each other."""
_POWER = 60


class Postfixes(Commands):
    """The part of the parser for postfixes and exponents."""

    def _postfix(self, left: Node, token: Token, power: int) -> Node | None:
        if token.text == "!":
            self.next()
            # `5!!` is the double factorial; with a space, `5! !`, the factorial of one.
            if self.peek() == ("operator", "!", False):
                self.next()
                if self.peek() != ("operator", "!", False):
                    return Apply("factorial2", (left,))
                return self._threefold(left)
            return Apply("factorial", (left,))
        if token.text == "%":
            self.next()
            return Apply("percent", (left,))
        if token.text in ("'", "prime") and isinstance(left, Symbol):
            self.next()
            return self._call_or(Symbol(left.name + "'"))
        # `f \circ g`, or `30 \circ` for degrees. Tighter than a power (60).
        if token.text == "circ" and power <= 65:
            self.next()
            return self._composition(left) or self._degrees(left)
        if token.text == "^" and power <= _POWER:
            return self._raised(left)
        return None

    def _threefold(self, left: Node) -> Node:
        self.next()
        return Apply("factorial", (Apply("factorial", (Apply("factorial", (left,)),)),))

    def _raised(self, left: Node) -> Node:
        self.next()
        if self.peek().text == "circ" or (
            self.peek().text == "group" and self.peek(1).text == "circ" and self.peek(2).text == "group"
        ):
            self.at += 1 if self.peek().text == "circ" else 3
            return self._degrees(left)
        if self.peek().text in ("prime", "'") and isinstance(left, Symbol):
            self.next()
            return self._call_or(Symbol(left.name + "'"))
        # `f^{\prime\prime}`.
        if self.peek().text == "group" and self.peek(1).text in ("prime", "'") and isinstance(left, Symbol):
            self.next()
            primes = ""
            while self.peek().text in ("prime", "'"):
                self.next()
                primes += "'"
            self.expect("close", "group")
            return self._call_or(Symbol(left.name + primes))
        # `A^\top` always; `M^T` only of a matrix as written, since of a letter it may be a power.
        if self.peek().text == "top" or (self.peek().text in ("T", "bold T") and isinstance(left, (Matrix, Bracket))):
            self.next()
            return Apply("transpose", (left,))
        if is_number_set(left) and (signed := self._signed_set(left)) is not None:
            return signed
        return Apply("^", (left, self.exponent()))

    def _signed_set(self, numbers: Node) -> Node | None:
        r"""The numbers of one sign: `\mathbb{Z}^+`, `\mathbb{R}^{-}`, `\mathbb{N}^*`; None where a power follows."""
        assert isinstance(numbers, Symbol)
        braced = self.peek().text == "group"
        sign = self.peek(int(braced)).text
        if sign not in ("+", "-", "*", "times") or (braced and self.peek(2) != ("close", "group", False)):
            return None
        self.at += 3 if braced else 1
        return Symbol(f"{numbers.name} {'*' if sign == 'times' else sign}")

    def exponent(self) -> Node:
        r"""Return the argument of `^` or `_`: a group, a signed power, or in LaTeX (`x^23`) one token; here a number is
        read whole."""
        # `2^-3`, without braces.
        if self.accept("operator", "-"):
            return Apply("neg", (self.exponent(),))
        if self.accept("operator", "+"):
            return self.exponent()
        if self.peek().kind == "number":
            return Number(Fraction(self.next().text))
        self.level += 1
        if self.level > MAX_DEPTH:
            raise UnreadableError("nested too deep")
        node = self.atom()
        self.level -= 1
        if self.peek().text == "^":
            return self._raised(node)
        return node
