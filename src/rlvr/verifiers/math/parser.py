r"""The reader of answers: tokens -> a tree, by precedence climbing.

Precedence, loosest first: lists, relations, trailing words, set operations, `+ -`, `* /` and juxtaposition, signs,
powers, postfixes. `parse` evaluates nothing, takes time linear in its text, and raises `UnreadableError` for what it
does not understand.
"""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction

from rlvr.verifiers.math.commands import INFIX_COMMANDS, PRODUCT, SUM, Commands
from rlvr.verifiers.math.expression import depth
from rlvr.verifiers.math.math_tokens import END, Token, UnreadableError, tokenize
from rlvr.verifiers.math.matrices import is_vector, settled
from rlvr.verifiers.math.node_kinds import (
    Apply,
    Bracket,
    Builder,
    Listing,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
    Words,
)
from rlvr.verifiers.math.reader import MAX_DEPTH
from rlvr.verifiers.math.units import conversion, dimension
from rlvr.verifiers.math.vocabulary import CONDITIONS, CURRENCIES

MAX_CHAIN = 24
"""Operations of one level that nest in the tree (`a/b/c`, `x!!!`)."""

# Each bar between the second and the last two is tried once, so that the cost is at most eight parses.
MAX_BARS = 12
"""Bars of a text that is read again where they can be paired in several ways."""

# Binding powers, as in a Pratt parser: an operator takes what binds at least as tight as its own power; SUM and PRODUCT
# are in commands.py.
_SETS = 20
_SIGN = 45
_INFIX = {
    "cup": _SETS, "cap": _SETS, "minus": _SETS, "vee": 8, "wedge": 8, "+": SUM, "-": SUM, "pm": SUM, "mp": SUM,
    "*": PRODUCT, "times": PRODUCT, "/": PRODUCT, ":": 15,
}  # fmt: skip
_CONNECTIVES = {"vee": "or", "wedge": "and"}
"""Signs between relations -> the words that they stand for; between anything else they are operations."""
_VECTOR_PRODUCTS = {"times": "cross", "*": "dot"}
_CLOSERS = {
    "(": ")]", "[": "])[", "{": "}", "<": ">", "floor": "floor", "ceil": "ceil", "group": "group", "bars": "bars",
}  # fmt: skip
# Matches `for any integer`, `where integers`, `for every integer`; not `for real`, `integer`.
_INTEGERS = re.compile(r"(?:for|where|with) (?:(?:any|every|all|each|some) )?integers?(?: values of)?", re.IGNORECASE)
"""Words before the letters that they declare to be integers."""
# Matches `the answer is`, `thus`, `x =`; not `the area of`.
_SAYS = re.compile(
    r"(?:\b(?:is|are|be|that|get|have|has|was|therefore|thus|hence|so|answer|equals|when|as)|=)$", re.IGNORECASE
)
"""Ends of the words that introduce the answer proper."""
# Matches `(D)`; not `(12)`, `D`.
_CHOICE = re.compile(r"\([A-Z]\)")


def parse(text: str, bare_units: bool = True, variables: frozenset[str] = frozenset()) -> Node:
    """The tree of a whole answer: one item, or a Listing of several; raises UnreadableError. letters.read decides about
    units."""
    tokens = tokenize(text, bare_units, variables)
    try:
        return _whole(tokens)
    except UnreadableError:
        # `||x||y||`: a bar that closed too early opens another absolute value instead.
        bars = [at for at, token in enumerate(tokens) if token.text == "|"]
        if not 6 <= len(bars) <= MAX_BARS:
            raise
        for at in bars[2:-2]:
            with contextlib.suppress(UnreadableError):
                return _whole(tokens, at)
        raise


def _whole(tokens: list[Token], opening_bar: int = -1) -> Node:
    parser = _Parser(list(tokens))
    parser.opening_bar = opening_bar
    node = parser.listing()
    if parser.peek() is not END:
        raise UnreadableError(f"unexpected {parser.peek().text!r}")
    # A level of the parser makes at most a few levels of the tree; the functions that walk it are recursive.
    if depth(node) > 3 * MAX_DEPTH:
        raise UnreadableError("nested too deep")
    return settled(node)


def _opens_condition(words: str) -> bool:
    return words.lower() in CONDITIONS or _INTEGERS.fullmatch(words) is not None


class _Parser(Commands):
    opening_bar = -1
    """The place of a bar that opens an absolute value within another one."""

    # lists and statements

    def listing(self) -> Node:
        """Items up to a closing token; `;` and line breaks separate looser than `,`."""
        groups: list[list[Node]] = [[]]
        separators: set[str] = set()
        while True:
            bar_closes = self.bars > 0 and self.peek().text == "|" and self.at != self.opening_bar
            if self.ends() or bar_closes:
                break
            item = self.statement()
            parts = _alternatives(item) if isinstance(item, Apply) else [item]
            groups[-1] += parts
            separators |= {"or"} if len(parts) > 1 else set()
            # `x < 1 \lor x > 2`: between relations the sign separates items.
            if isinstance(item, Relation) and self.peek().kind == "operator" and self.peek().text in _CONNECTIVES:
                self.tokens[self.at] = Token("separator", _CONNECTIVES[self.peek().text])
            if self.peek().kind != "separator":
                break
            kinds = set()
            while self.peek().kind == "separator":
                kinds.add(self.next().text.replace("\\\\", ";"))
            if self.ends():
                break
            kind = next((word for word in ("or", "and", ";") if word in kinds), ",")
            separators.add(kind)
            if kind == ";":
                groups.append([])
        loose = separators - {","}
        # `5 h and 30 min` is one measure.
        if separators == {"and"} and len(groups[0]) == 2 and (whole := _compound(*groups[0])) is not None:
            return whole
        if not groups[0]:
            raise UnreadableError("nothing where an expression should be")
        # `p = 5, q = 2; p = 7, q = 3`: the semicolon separates groups.
        if len(groups) > 1:
            outer = [items[0] if len(items) == 1 else Listing(",", tuple(items)) for items in groups if items]
            return Listing(";", tuple(outer))
        if len(groups[0]) == 1:
            return groups[0][0]
        return Listing(min(loose) if len(loose) == 1 else ",", tuple(groups[0]))

    def statement(self) -> Node:
        """An optional label in words, a chain of relations."""
        label = self._label()
        if label is not None:
            return Relation(("=",), (label, self.expression(8)))
        self.accept("relation", "~")  # `\approx 42` alone says no more than 42
        following = self.peek(1).kind
        if self.peek().kind == "words" and following not in ("end", "separator", "close", "relation", "environment"):
            if not _SAYS.search(self.next().text):
                raise UnreadableError("words before an expression")
        # `\text{the answer is } = 5`: the words that only announce are skipped.
        elif self.peek().kind == "words" and self.peek(1).kind == "relation":
            self.at += _SAYS.search(self.peek().text) is not None
        sides = [self.expression(8)]
        operators = []
        while self.peek().kind == "relation" and self.peek().text not in ("mid", "|"):
            operators.append(self.next().text)
            if len(operators) > MAX_CHAIN:
                raise UnreadableError("a chain of too many relations")
            sides.append(self.expression(9))  # a sign `or` joins relations, not their sides
        node = Relation(tuple(operators), tuple(sides)) if operators else sides[0]
        # `2k \text{ where } k > 0`.
        if self.peek().kind == "words" and _opens_condition(self.peek().text):
            integers = _INTEGERS.fullmatch(self.next().text)
            condition = self.statement()
            return Builder(node, (Relation(("in",), (condition, Symbol("Integers"))) if integers else condition,))
        return node

    def _label(self) -> Words | None:
        r"""Words that name the value behind them: `\text{Red: } 5`, `Area: 7`, `\textbf{(D) } 12`."""
        token = self.peek()
        following = self.peek(1)
        if token.kind != "words" or following.kind in ("end", "separator", "close"):
            return None
        colon = following.kind == "operator" and following.text == ":"
        if not colon and not token.text.endswith(":") and not _CHOICE.fullmatch(token.text):
            return None
        self.at += 2 if colon else 1
        return Words(token.text.rstrip(": "))

    # expressions

    def expression(self, power: int) -> Node:
        self.level += 1
        if self.level > MAX_DEPTH:
            raise UnreadableError("nested too deep")
        node = self.prefix()
        chain = 0
        while True:
            longer = self.infix(node, power)
            if longer is None:
                break
            # Sums and products are flat in the tree, however long; all other operations nest once more.
            if not (isinstance(longer, Apply) and longer.head in "+*"):
                chain += 1
            if chain > MAX_CHAIN:
                raise UnreadableError("a chain of too many operations")
            node = longer
        self.level -= 1
        return node

    def infix(self, left: Node, power: int) -> Node | None:
        """`left` with one more operator and its right side, or None where the expression ends."""
        token = self.peek()
        # `\int x dx + 1`: behind `dx` the body is over, and the sum goes on outside.
        if self.integrals and self.integrals[-1]["done"] == 1 and self.level <= int(self.integrals[-1]["level"]) + 1:
            return None
        if token.kind == "operator" and token.text != "|":
            if token.text in _INFIX:
                return self._binary(left, token, power)
            return self._postfix(left, token, power)
        # `7 \bmod 3`, `2 \pmod 3`, `n \choose k`, `a \over b`.
        if token.kind == "command" and token.text in INFIX_COMMANDS:
            head, binding, right = INFIX_COMMANDS[token.text]
            if binding < power:
                return None
            self.next()
            return Apply(head, (left, self.expression(right)))
        # `2 (mod 3)`.
        if token.kind == "open" and token.text == "(" and self.peek(1).text in ("mod", "bmod") and power <= 12:
            self.at += 2
            modulus = self.expression(SUM)
            self.expect("close", ")")
            return Apply("pmod", (left, modulus))
        if (
            token.text == "("
            and token.kind == "open"
            and self.peek(1).kind == "symbol"
            and self.peek(2).kind == "relation"
        ):
            # A condition in brackets behind a value: `k\pi \ (k \in \mathbb Z)`.
            if power > 12:
                return None
            bracket = self._bracket(self.next().text)
            return Builder(left, bracket.items if isinstance(bracket, Bracket) else (bracket,))
        # `2|x|`: a bar where none is open begins an absolute value.
        if token.text == "|" and (self.bars == 0 or self.at == self.opening_bar) and power <= PRODUCT:
            return self._times(left, self.expression(PRODUCT + 1))
        if (
            token.kind == "words"
            and _opens_condition(token.text)
            and self.peek(1).kind not in ("end", "separator", "close")
        ):
            return None
        # `5\$`.
        if token.kind == "currency" and power <= 12:
            return Quantity(left, CURRENCIES[self.next().text])
        if token.kind == "words" and power <= 12:
            return Quantity(left, self._unit())
        starts = token.kind in ("number", "symbol", "function", "open", "command") or token.text.startswith("begin ")
        if starts and power <= PRODUCT:
            return self._juxtaposed(left, token)
        return None

    def _binary(self, left: Node, token: Token, power: int) -> Node | None:
        binding = _INFIX[token.text]
        if binding < power or (token.text == ":" and self.bars < 0):
            return None
        self.next()
        if (
            token.text in ("+", "-")
            and self.peek().kind in ("end", "close", "operator")
            and self.peek().text in ("", ")", "}", "group")
        ):
            raise UnreadableError("a sign without a number")
        right = self.expression(binding + 1)
        if token.text == "-":
            right = Apply("neg", (right,))
        # `\vec{a} \times \vec{b}`: no product of numbers.
        if token.text in _VECTOR_PRODUCTS and is_vector(right):
            *scalars, last = left.args if isinstance(left, Apply) and left.head == "*" else (left,)
            if is_vector(last):
                product = Apply(_VECTOR_PRODUCTS[token.text], (last, right))
                if scalars:
                    return Apply("*", (*scalars, product))
                return product
        head = {"-": "+", "times": "*"}.get(token.text, token.text)
        if head in ("+", "*") and isinstance(left, Apply) and left.head == head:
            return Apply(head, (*left.args, right))
        if token.text == ":":
            return _ratio(left, right, self.peek(-1))
        return Apply(head, (left, right))

    def _unit(self) -> str:
        """Words after a value, with powers and further words: `cm^2`, `miles per hour`, `m / s`."""
        parts = []
        while True:
            token = self.peek()
            if token.kind == "words":
                parts.append(self.next().text)
            # `5 \text{ cm}^2`.
            elif token.text == "^" and parts:
                self.next()
                braced = self.accept("open", "group")
                sign = "-" if self.accept("operator", "-") else ""
                if self.peek().kind != "number":
                    raise UnreadableError("a power of words")
                parts[-1] += f"^{sign}{self.next().text}"
                if braced:
                    self.expect("close", "group")
            elif token.text in ("/", "*", "times") and self.peek(1).kind == "words":
                parts.append("/" if self.next().text == "/" else "*")
            else:
                return " ".join(parts)

    def _juxtaposed(self, left: Node, token: Token) -> Node | None:
        if isinstance(left, Quantity):
            measures = token.kind == "number"  # `5 h 30 min`
            whole = _compound(left, Quantity(self.expression(PRODUCT + 1), self._unit())) if measures else None
            if whole is None:
                raise UnreadableError("words between two expressions")
            return whole
        return self._times(left, self.expression(PRODUCT + 1))

    @staticmethod
    def _times(left: Node, right: Node) -> Node:
        if isinstance(left, Apply) and left.head == "*":
            return Apply("*", (*left.args, right))
        return Apply("*", (left, right))

    def prefix(self) -> Node:
        token = self.peek()
        if token.kind == "currency":
            self.next()
            return Quantity(self.expression(PRODUCT), CURRENCIES[token.text])
        if token.kind == "operator" and token.text in ("+", "-", "pm", "mp"):
            self.next()
            arg = self.expression(_SIGN)
            if token.text == "+":
                return arg
            return Apply({"-": "neg"}.get(token.text, token.text), (arg,))
        return self.atom()

    def atom(self) -> Node:
        token = self.next()
        match token.kind:
            case "number":
                return self.number(token)
            case "symbol":
                return self._symbol(token)
            case "words":
                return Words(token.text)
            case "function":
                return self._function(token.text)
            case "open":
                bracket = self._bracket(token.text)
                return self._composed_call(bracket) or self._based(bracket)
            case "command":
                return self._command(token.text)
            case "environment":
                return self._environment(token.text)
            case "operator" if token.text == "|":
                return self._absolute()
        raise UnreadableError(f"unexpected {token.text or 'end'!r}")

    def _symbol(self, token: Token) -> Node:
        name = token.text
        # The `d` of `\int f(x)\,dx`.
        if self.integrals and name == "d" and self.peek().kind == "symbol" and self.integrals[-1]["done"] == 0:
            self.integrals[-1].update(done=1, variable=self._name(self.next().text))
            return Number(Fraction(1))
        return self._call_or(Symbol(self._name(name)))

    def _bracket(self, opening: str) -> Node:
        self.level += 1
        if self.level > MAX_DEPTH:
            raise UnreadableError("nested too deep")
        node = self._inside(lambda: self._bracketed(opening), -1 if opening == "{" else 0)
        self.level -= 1
        return node

    def _bracketed(self, opening: str) -> Node:
        if self.peek().kind == "close" and self.peek().text in _CLOSERS[opening] and opening in "({[":
            return Bracket(opening, self.next().text, ())
        inner = self.listing()
        # `(5,)`.
        if opening in "([" and not isinstance(inner, Listing) and self.peek(-1).kind == "separator":
            raise UnreadableError("a tuple of one")
        # `\{x \mid x > 2\}`.
        if opening == "{" and self.peek().text in ("mid", "|", ":"):
            self.next()
            listed = self.listing()
            self.expect("close", "}")
            conditions = listed.items if isinstance(listed, Listing) and listed.separator != "or" else (listed,)
            return Bracket("{", "}", (Builder(inner, conditions),))
        closing = self.next()
        if closing.kind not in ("close", "open") or closing.text not in _CLOSERS[opening]:
            raise UnreadableError(f"{opening} is closed by {closing.text!r}")
        if opening == "group":
            return inner
        if opening in ("floor", "ceil"):
            return Apply(opening, (inner,))
        # `\lVert v \rVert`.
        if opening == "bars":
            return Apply("abs", (inner,))
        items = inner.items if isinstance(inner, Listing) and inner.separator in (",", ";") else (inner,)
        return Bracket(opening, closing.text, items)

    def _absolute(self) -> Node:
        outer = self.bars
        self.bars = max(self.bars, 0) + 1
        node = self.expression(_SETS)
        self.bars = outer
        self.expect("operator", "|")
        return Apply("abs", (node,))


# parts that are one answer together: a measure in two units, a time of day, alternatives joined by a sign


def _compound(first: Node, second: Node) -> Quantity | None:
    """The sum of two measures of one kind, the second in a smaller unit and less than one of the first; else None."""
    match first, second:
        case Quantity(Number(whole, 0), unit), Quantity(Number(rest, 0), small):
            if dimension(unit) is None or dimension(small) is None:
                return None
            factor = conversion(unit, small)
            if factor is not None and factor < 1 and rest * factor < 1:
                return Quantity(Number(whole + rest * factor), unit)
    return None


def _ratio(left: Node, right: Node, last: Token) -> Node:
    """`3 : 1`, or a time of day where `last`, the last token of the right side, has a leading zero (`6:05`): no ratio
    is written so."""
    is_time = isinstance(right, Number) and len(last.text) == 2 and last.text[0] == "0"
    if isinstance(left, Apply) and left.head in (":", "time"):
        return Apply("time" if is_time else left.head, (*left.args, right))
    return Apply("time" if is_time else ":", (left, right))


def _alternatives(node: Node) -> list[Node]:
    r"""The relations that `(x < 1) \lor (x > 2)` joins; anything else as it is."""
    match node:
        case Apply("vee", args):
            parts = [part for arg in args for part in _alternatives(arg)]
            if all(isinstance(part, Relation) for part in parts):
                return parts
            return [node]
        case Bracket("(", ")", (Relation() as relation,)):
            return [relation]
    return [node]
