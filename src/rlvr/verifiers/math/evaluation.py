r"""Values of expressions, at the sample point of an evaluation.

What has no value of its own (an unknown function, an integral) gets a stand-in that tells different ones apart.
Verdicts are deterministic: the sample points are fixed.

Derivatives and antiderivatives are not worked out. The rule, decided here alone, of which letters under them depend on
their variable: usual names of functions and unknowns do (`f`, `u`, `y`, `\rho`), and a letter that is differentiated
alone; all others are constant factors. So $\frac{d}{dx}(ay)$ is $a\frac{dy}{dx}$, and $\frac{d}{dx}(uv)$ is not
$u\frac{dv}{dx}$. Integrals know only names of functions: other letters are parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rlvr.verifiers.math.expression import binds, symbols
from rlvr.verifiers.math.guarded_arithmetic import GuardedArithmetic, UnknownValueError, Value
from rlvr.verifiers.math.node_kinds import Apply, Binder, Bracket, Matrix, Node, Number, Quantity, Symbol

MAX_TERMS = 60
"""Terms of a sum or product that is computed."""

_FUNCTIONS = frozenset("fghuvwFGH")
_UNKNOWNS = _FUNCTIONS | frozenset("xyzTVPEBLUS") | {"rho", "phi", "psi", "theta", "sigma", "Phi", "Psi"}
_CONSTANTS = frozenset("abckmnq") | {"pi", "alpha", "beta", "gamma", "epsilon", "kappa", "lambda", "mu"}


class NumericEvaluator(GuardedArithmetic):
    """Values of expressions at one point: `point` maps the free symbols to fractions, or to complex numbers."""

    def __call__(self, node: Node) -> Value:
        self.fuel.spend(self.cost)
        match node:
            case Number():
                return node.value
            case Symbol():
                return self._symbol(node.name)
            case Apply():
                return self._apply(node)
            case Bracket("(" | "[" | "{", ")" | "]" | "}", (item,)):
                return self(item)
            case Quantity():
                return self(node.value)
            case Binder():
                return self._bound(node)
            case _:
                raise UnknownValueError(f"{type(node).__name__} is no number")

    def _symbol(self, name: str) -> Value:
        if name in self.point:
            value = self.point[name]
            if isinstance(value, Fraction):
                return value
            return self.mp.mpc(*map(self.inexact, value))
        match name:
            case "pi":
                return +self.mp.pi
            case "e":
                return +self.mp.e
            case "i":
                return self.mp.mpc(0, 1)
            case _:
                raise UnknownValueError(f"{name} has no value")

    def _apply(self, node: Apply) -> Value:
        head = node.head
        if head == "det" and isinstance(node.args[0], Matrix):
            return self._determinant(node.args[0])
        if head == "mean":
            return self._mean(node.args[0])
        if head.startswith("call "):
            return self._scrambled(head, [self(arg) for arg in node.args])
        # exp(x) at the full precision, rather than a power of a rounded e.
        if head == "^" and node.args[0] == Symbol("e"):
            return self._exp(self(node.args[1]))
        return self.operate(head, [self(arg) for arg in node.args])

    def _determinant(self, matrix: Matrix) -> Value:
        # Elimination takes n^3 steps; six rows are more than answers have.
        if len(matrix.rows) != len(matrix.rows[0]) or len(matrix.rows) > 6:
            raise UnknownValueError("a determinant of no small square matrix")
        rows = [[self(entry) for entry in row] for row in matrix.rows]
        result: Value = Fraction(1)
        for column in range(len(rows)):
            # Partial pivoting: the largest entry, since a division by a small one would lose digits.
            pivot = max(range(column, len(rows)), key=lambda row: abs(rows[row][column]))
            if rows[pivot][column] == 0:
                return Fraction(0)
            if pivot != column:
                rows[pivot], rows[column] = rows[column], rows[pivot]
                result = -result
            result = self.multiply(result, rows[column][column])
            for row in rows[column + 1 :]:
                factor = self.divide(row[column], rows[column][column])
                for place in range(column, len(row)):
                    row[place] = self.add(row[place], self.multiply(Fraction(-1), factor, rows[column][place]))
        return result

    # what has no value of its own

    def _scrambled(self, name: str, args: Sequence[Value]) -> Value:
        """A smooth stand-in for an unknown function: different names or arguments give different values."""
        # crc32 and not `hash`: the hash of a text differs from process to process, and verdicts must not.
        seed = zlib.crc32(name.encode())
        total = self.mp.mpf(seed % 9973) / 997
        for place, arg in enumerate(args):
            self._moderate(arg)
            total += self.inexact(arg) * (self.mp.mpf(1 + (seed >> 8) % 101) / 89 + place)
        self.fuel.spend(8)
        # Between 1 and 3: never zero, so that quotients of unknown functions have a value.
        return self.mp.cos(total) + 2

    def _mean(self, body: Node) -> Value:
        """An expected value, of a fixed distribution of the capital letters (all letters, if there are none) at three
        points."""
        names = symbols(body)
        random = {name for name in names if name[0].isupper()} or names
        total: Value = Fraction(0)
        outer = self.point
        # Weights of a distribution sum to 1, so that `E[3] = 3` and `E[aX + b] = a E[X] + b` hold exactly.
        for number, weight in enumerate((Fraction(1, 2), Fraction(1, 3), Fraction(1, 6))):
            values = {name: Fraction(1 + zlib.crc32(f"{name} {number}".encode()) % 97, 14) for name in random}
            self.point = {**outer, **values}
            try:
                total = self.add(total, self.multiply(weight, self(body)))
            finally:
                self.point = outer
        return total

    def _bound(self, node: Binder) -> Value:
        """A short sum or product is computed; any other operator is a linear functional of its body."""
        limits = [self._limit(limit) for limit in (node.lower, node.upper) if limit is not None]
        # A sum with numbers for limits, and short: worked out exactly, so that `\sum_{k=1}^{4} k` is 10.
        if node.kind in ("sum", "prod") and all(isinstance(v, Fraction) and v.denominator == 1 for v in limits):
            first, last = (int(value) for value in limits)
            if last - first < MAX_TERMS:
                terms = list(self._bodies(node, [Fraction(k) for k in range(first, last + 1)]))
                if node.kind == "prod":
                    return self.multiply(Fraction(1), *terms)
                return self.add(Fraction(0), *terms)
        # Three arbitrary places: linear in the body, so that constants may stand in front of an integral or behind it,
        # while the limits choose the weights.
        places = [Fraction(3, 7), Fraction(13, 11), Fraction(29, 13)]
        # A derivative and an antiderivative depend on their variable by name: d/dx is not d/dy.
        if binds(node):
            kind = node.kind
        else:
            kind = f"{node.kind} {node.variable}"
        total: Value = Fraction(0)
        for number, body in enumerate(self._bodies(node, places)):
            weight = self._scrambled(f"{kind} {number} {len(limits)}", limits)
            total = self.add(total, self.multiply(weight, body))
        return total

    def _limit(self, node: Node) -> Value:
        # A limit at infinity has no value: a fixed number stands for it, by its name.
        if isinstance(node, Symbol) and (node.name == "infinity" or node.name.startswith("order ")):
            return Fraction(zlib.crc32(node.name.encode()) % 1009, 97)
        if isinstance(node, Apply) and node.head == "neg":
            return -self._limit(node.args[0])
        return self(node)

    def _bodies(self, node: Binder, places: Sequence[Fraction]) -> Iterator[Value]:
        outer = self.point
        for place in places:
            self.point = moved(node, outer, place)
            try:
                yield self(node.body)
            finally:
                self.point = outer


def is_constant(name: str) -> bool:
    r"""Return True if a letter under $\nabla$ is a constant; any other is a field."""
    return _base(name) in _CONSTANTS


def _base(name: str) -> str:
    return name.rpartition(" ")[2].partition("_")[0].rstrip("'")


def moved(node: Binder, point: Mapping[str, Any], place: Fraction) -> dict[str, Any]:
    """The point where the operator's variable is `place`, and what depends on it has moved along; sums only set their
    variable."""
    place_of = dict(point)
    if node.kind == "diff" or node.kind.endswith("int"):
        movable = _UNKNOWNS if node.kind == "diff" else _FUNCTIONS
        for name in symbols(node.body) - {node.variable}:
            if isinstance(point.get(name), Fraction) and (
                _base(name) in movable or (node.kind == "diff" and node.body == Symbol(name))
            ):
                place_of[name] = point[name] + Fraction(1 + zlib.crc32(f"{name} {place}".encode()) % 97, 14)
    place_of[node.variable] = place
    return place_of
