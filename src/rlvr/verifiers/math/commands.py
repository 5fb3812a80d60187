r"""Parsing of commands and named functions (fractions, roots, integrals, sums, limits, matrices, `\sin x`), and of what
stands behind an operand: `!`, `%`, primes, degrees, powers, transposes."""

from __future__ import annotations

from fractions import Fraction

from rlvr.verifiers.math.declarations import is_number_set
from rlvr.verifiers.math.math_tokens import Token, UnreadableError, tokenize
from rlvr.verifiers.math.node_kinds import (
    Apply,
    Binder,
    Bracket,
    Listing,
    Matrix,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
)
from rlvr.verifiers.math.reader import MAX_DEPTH, Reader
from rlvr.verifiers.math.vocabulary import FUNCTIONS

SUM = 30
PRODUCT = 40
"""Binding powers of `+` and `*`."""
_POWER = 60  # that of `^`
INFIX_COMMANDS = {
    "mod": ("mod", 35, 36),
    "bmod": ("mod", 35, 36),
    "choose": ("binom", 12, 13),
    "over": ("/", 12, 13),
    "pmod": ("pmod", 12, PRODUCT),
}
"""Commands that stand between their arguments: the operation, its binding power and that of its right argument."""
# Letters that name functions: `f(x)` is a call, `a(x)` a product.
_CALLS = frozenset("fghFGH")
_DECORATIONS = frozenset(
    ["overline", "bar", "vec", "hat", "tilde", "widehat", "overrightarrow", "dot", "ddot", "angle", "triangle"]
)

_ROWS = frozenset(
    """
    matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array cases aligned align* align split
    """.split()  # noqa: SIM905
)


class Commands(Reader):
    """The part of the parser for commands, named functions, postfixes and exponents."""

    def _function(self, name: str) -> Node:
        index = exponent = None
        while self.peek().text in ("_", "^") and name not in ("sqrt", "cbrt"):
            if self.next().text == "_":
                index = self.exponent()
            else:
                exponent = self.exponent()
        # `\max_{x} f(x)` needs an optimiser, which there is none.
        if name in ("max", "min") and index is not None:
            raise UnreadableError("an optimum over a set")
        if name == "sqrt":
            return self._root()
        listed = name in ("max", "min", "gcd", "lcm") and self.accept("open", "{")
        args = self._listed("}") if listed else self._arguments()
        if exponent == Apply("neg", (Number(Fraction(1)),)) and f"a{name}" in FUNCTIONS.values():
            name = f"a{name}"
            exponent = None
        node: Node = Apply(name, args if index is None else (*args, index))
        if exponent is None:
            return node
        return Apply("^", (node, exponent))

    def _listed(self, closing: str) -> tuple[Node, ...]:
        """Arguments up to a closing bracket."""
        inner = self._inside(self.listing)
        self.expect("close", closing)
        if isinstance(inner, Listing):
            return inner.items
        return (inner,)

    def _root(self) -> Node:
        degree = None
        # `\sqrt[3]{8}`.
        if self.accept("open", "["):
            degree = self.expression(SUM)
            self.expect("close", "]")
        # A power behind the radicand is one of the root: \sqrt{x}^2 is x.
        if self.peek().kind in ("number", "operator"):
            radicand = self.exponent()
        else:
            radicand = self.atom()
        return Apply("root", (radicand,) if degree is None else (radicand, degree))

    def _arguments(self) -> tuple[Node, ...]:
        """The argument of a named function: in brackets, or the product that follows (`\\sin 2x \\cos y` is two
        factors)."""
        grouped = self.peek().text == "group" and self.peek(1).text == "("
        if self.peek() == ("open", "(", self.peek().spaced) or (grouped and self.next()):
            self.next()
            args = self._listed(")")
            if grouped:
                self.expect("close", "group")
            return args
        factors: list[Node] = []
        while True:
            token = self.peek()
            # `\sin x \cos y`: the next function is no argument of this one.
            if (token.kind == "function" and factors) or token.text in INFIX_COMMANDS:
                break
            if token.kind not in ("number", "symbol", "function", "open", "command") and not (
                token.text == "|" and not factors
            ):
                # `\sin -x`.
                if not factors and token.text in ("-", "+"):
                    factors.append(self.expression(PRODUCT + 1))
                break
            # `\sin x (y)` is (sin x) times y.
            if factors and token.kind == "open" and token.text != "group":
                break
            # `\int \sin x\,dx`: the `d` ends the argument.
            if factors and token.text == "d" and self.integrals:
                break
            factors.append(self.expression(PRODUCT + 1))
        if not factors:
            raise UnreadableError("a function without an argument")
        return (factors[0] if len(factors) == 1 else Apply("*", tuple(factors)),)

    def _command(self, name: str) -> Node:
        if name == "frac":
            # `\frac{d}{dx} y` first: it has the form of any fraction.
            return self._derivative() or Apply("/", (self._argument(), self._argument()))
        if name in ("binom", "tbinom", "dbinom"):
            return Apply("binom", (self._argument(), self._argument()))
        if name in ("int", "iint", "oint"):
            return self._integral(name)
        if name in ("sum", "prod"):
            return self._sum(name)
        if name == "lim":
            return self._limit()
        if name in _DECORATIONS:
            return self._decorated(name)
        raise UnreadableError(f"\\{name} is not understood here")

    def _argument(self) -> Node:
        r"""The argument of a command: a group, or one token: `\frac12` is 1/2, `\frac1e9` is 1/e times 9."""
        token = self.peek()
        # TeX takes one token where there is no brace.
        if token.kind == "number" and len(token.text) > 1 and token.text[0].isdecimal():
            self.tokens[self.at : self.at + 1] = tokenize(token.text[1:])
            return Number(Fraction(token.text[0]))
        return self.exponent()

    def _call_or(self, symbol: Symbol) -> Node:
        """`f(x)` as a call where f is a usual name of a function or has a prime, else the symbol alone."""
        if (bare := symbol.name.removeprefix("bold ")) == "E" and self._opens_expectation():
            return self._expectation()
        grouped = self.peek().text == "group" and self.peek().kind == "open" and self.peek(1).text == "("
        if not ((self.peek() == ("open", "(", False)) or grouped) or not (bare[0] in _CALLS or "'" in bare):
            return symbol
        if grouped:
            self.next()
        self.next()
        args = self._listed(")")
        if grouped:
            self.expect("close", "group")
        return Apply(f"call {bare}", args)

    def _opens_expectation(self) -> bool:
        """Return True if an expected value follows: `E[`, or `E(` with a random variable, a capital letter, behind
        it."""
        opening = self.peek()
        inner = self.peek(1)
        if opening.kind != "open" or opening.spaced:
            return False
        return opening.text == "[" or (opening.text == "(" and inner.kind == "symbol" and inner.text.isupper())

    def _expectation(self) -> Node:
        closing = "]" if self.next().text == "[" else ")"
        inner = self._inside(self.listing)
        self.expect("close", closing)
        if isinstance(inner, Listing):
            return Apply("call E", inner.items)
        return Apply("mean", (inner,))

    def _composition(self, left: Node) -> Node | None:
        r"""`f \circ g`, as a function of functions whose order counts; None where the sign is one of degrees."""
        composed = isinstance(left, Apply) and left.head == "call compose"
        if self.peek().kind != "symbol" or not (composed or isinstance(left, Symbol)):
            return None
        inner = Symbol(self._name(self.next().text))
        whole = Apply("call compose", (*left.args, inner) if isinstance(left, Apply) else (left, inner))
        return self._composed_call(whole) or whole

    def _composed_call(self, function: Node) -> Node | None:
        r"""`(f \circ g)(x)` and `f \circ g(x)` as `f(g(x))`; None where no composition or no argument stands here."""
        if isinstance(function, Bracket) and len(function.items) == 1:
            function = function.items[0]
        if not (isinstance(function, Apply) and function.head == "call compose" and self.accept("open", "(")):
            return None
        arguments = self._listed(")")
        for name in reversed(function.args):
            assert isinstance(name, Symbol)  # _composition takes nothing else
            arguments = (Apply(f"call {name.name}", arguments),)
        return arguments[0]

    def _degrees(self, left: Node) -> Node:
        # `20^\circ C`.
        if self.peek().kind == "symbol" and self.peek().text in "CF":
            return Quantity(left, f"degrees {self.next().text}")
        return Apply("degree", (left,))

    def _derivative(self) -> Node | None:
        r"""`\frac{d}{dx} y`, `\frac{dy}{dx}`, `\frac{d^2y}{dx^2}`; None where the fraction is something else."""
        start = self.at
        order = "1"
        if not (self.accept("open", "group") and (self.accept("symbol", "d") or self.accept("command", "partial"))):
            self.at = start
            return None
        if self.accept("operator", "^"):
            braced = self.accept("open", "group")
            order = self.next().text
            if braced:
                self.accept("close", "group")
        if self.peek().text == "group":
            body = None
        else:
            body = self.expression(SUM)
        if (
            not (
                self.accept("close", "group")
                and self.accept("open", "group")
                and (self.accept("symbol", "d") or self.accept("command", "partial"))
            )
            or self.peek().kind != "symbol"
        ):
            self.at = start
            return None
        variable = self._name(self.next().text)
        if self.accept("operator", "^"):
            self.exponent()
        if not self.accept("close", "group"):
            self.at = start
            return None
        return Binder(
            "diff", variable, Symbol(f"order {order}"), None, self.expression(PRODUCT) if body is None else body
        )

    def _bounds(self) -> tuple[Node | None, Node | None]:
        lower = upper = None
        while self.peek().text in ("_", "^"):
            if self.next().text == "^":
                upper = self._limit_argument()
            elif self.accept("open", "group"):
                lower = self.statement()
                self.expect("close", "group")
            else:
                lower = self._limit_argument()
        return lower, upper

    def _limit_argument(self) -> Node:
        """Return the argument of `^` or `_` where an index may follow: a name or number stands alone."""
        token = self.peek()
        if token.kind == "number":
            return Number(Fraction(self.next().text))
        if token.kind == "symbol":
            return Symbol(self.next().text)
        return self.exponent()

    def _integral(self, name: str) -> Node:
        lower, upper = self._bounds()
        self.integrals.append({"done": 0, "level": self.level, "variable": ""})
        body = self.expression(SUM)
        variable = str(self.integrals.pop()["variable"])
        # `\int_0^1 x`: the variable cannot be told.
        if not variable and lower is not None:
            raise UnreadableError("an integral without its variable")
        return Binder(name, variable or "x", lower, upper, body)

    def _sum(self, name: str) -> Node:
        lower, upper = self._bounds()
        if not (
            isinstance(lower, Relation)
            and lower.operators == ("=",)
            and isinstance(lower.sides[0], Symbol)
            and upper is not None
        ):
            raise UnreadableError("a sum without its limits")
        return Binder(name, lower.sides[0].name, lower.sides[1], upper, self.expression(PRODUCT))

    def _limit(self) -> Node:
        self.expect("operator", "_")
        self.expect("open", "group")
        side = ""
        variable = self.expression(SUM)
        self.expect("relation", "to")
        target = self.expression(PRODUCT + 25)
        if self.accept("operator", "^"):
            braced = self.accept("open", "group")
            side = self.next().text
            if braced:
                self.expect("close", "group")
        self.expect("close", "group")
        if not isinstance(variable, Symbol) or side not in ("", "+", "-"):
            raise UnreadableError("a limit over something that is no variable")
        return Binder(f"lim{side}", variable.name, target, None, self.expression(PRODUCT))

    def _decorated(self, name: str) -> Node:
        letters = []
        if self.accept("open", "group"):
            while self.peek().kind in ("symbol", "words"):
                letters.append(self._name(self.next().text))
            self.expect("close", "group")
        else:
            while self.peek().kind == "symbol" and (not letters or name in ("angle", "triangle")):
                letters.append(self._name(self.next().text))
        if not letters:
            raise UnreadableError(f"\\{name} without letters")
        return Symbol(f"{name} {''.join(letters)}")

    def _environment(self, text: str) -> Node:
        command, _, name = text.partition(" ")
        if command != "begin" or name not in _ROWS:
            raise UnreadableError(f"{text} is not understood")
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while not self.ends():
            if self.peek().text == "\\\\":
                self.next()
                rows.append(tuple(row))
                row = []
                continue
            row.append(self._inside(self.statement))
            if not self.accept("operator", "&") and self.peek().text == ",":
                self.next()
        if self.next().text != f"end {name}":
            raise UnreadableError("an environment that does not end")
        if row:
            rows.append(tuple(row))
        rows = [entries for entries in rows if entries]
        if not rows or (len({len(entries) for entries in rows}) > 1 and name != "cases"):
            raise UnreadableError("rows of different lengths")
        matrix = Matrix(tuple(rows))
        # \begin{cases} ... \end{cases}: rows of a value and its condition.
        if name == "cases":
            return Apply("cases", tuple(Bracket("(", ")", entries) for entries in rows))
        # Bars round a matrix are its determinant.
        if name == "vmatrix":
            return Apply("det", (matrix,))
        return matrix

    # what stands behind an operand

    def _postfix(self, left: Node, token: Token, power: int) -> Node | None:
        if token.text == "!":
            self.next()
            # `5!!` is the double factorial; with a space, `5! !`, the factorial of one.
            if self.peek() == ("operator", "!", False):
                self.next()
                if self.peek() != ("operator", "!", False):
                    return Apply("factorial2", (left,))
                self.next()
                return Apply("factorial", (Apply("factorial", (Apply("factorial", (left,)),)),))
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

    def _raised(self, left: Node) -> Node:
        self.next()
        if self.peek().text == "circ" or (
            self.peek().text == "group" and self.peek(1).text == "circ" and self.peek(2).text == "group"
        ):
            self.at += 1 if self.peek().text == "circ" else 3
            return self._degrees(left)
        # `f^\prime`, `f^{\prime\prime}`.
        braced = self.peek().text == "group"
        if self.peek(int(braced)).text in ("prime", "'") and isinstance(left, Symbol):
            self.at += int(braced)
            name = left.name
            while self.peek().text in ("prime", "'"):
                self.next()
                name += "'"
            if braced:
                self.expect("close", "group")
            return self._call_or(Symbol(name))
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
