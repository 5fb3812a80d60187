r"""The plain form of a value: without brackets round it, prose behind it or scale words in its unit.

Sums and products of matrices are worked out into one matrix, so that answers are compared entry by entry.
"""

from __future__ import annotations

from fractions import Fraction

from rlvr.verifiers.math.expression import children, is_literal
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Builder, Matrix, Node, Number, Quantity, Symbol, Words
from rlvr.verifiers.math.units import SCALES, changes_meaning

# A product has one sum for each entry; larger matrices are not worked out.
MAX_SIDE = 6
"""Rows of a matrix that is multiplied."""

_SPOKEN = {
    **dict.fromkeys(["all real numbers", "all reals", "real numbers", "all real", "the real numbers"], "Reals"),
    **dict.fromkeys(["the set of all real numbers", "all real x"], "Reals"),
    **dict.fromkeys(["no solution", "no solutions", "no real solutions", "no real solution"], "emptyset"),
    **dict.fromkeys(["empty set", "the empty set", "none"], "emptyset"),
    **dict.fromkeys(["dne", "does not exist", "undefined"], "undefined"),
    "infinity": "infinity",
}


class RefusedError(Exception):
    """The answer states something that cannot be right: a false equality, a hedge."""


def plain(node: Node) -> Node:
    """`node` without brackets round the whole, prose after it, or a unit that is a factor."""
    match node:
        # `(5)` is 5; a set-builder in brackets is a value with a condition.
        case Bracket("(", ")", (item,)) if not isinstance(item, Builder):
            return plain(item)
        case Bracket("[", "]", (item,)) if not is_literal(item):  # `[7]` is a list
            return plain(item)
        case Bracket("{", "}", ()):
            return Symbol("emptyset")
        # `5 million dollars` is a scaled value with a unit.
        case Quantity(value, unit):
            return _quantity(plain(value), unit)
        # `-5\%` is the percentage of -5, so that the sign stands inside the mark that may be left out.
        case Apply("neg", (Apply("percent" | "degree" as head, (arg,)),)):
            return Apply(head, (Apply("neg", (arg,)),))
        # `-\$5`: the sign belongs to the value, and the unit stands outside of it.
        case Apply("neg", (Quantity(value, unit),)):
            return plain(Quantity(Apply("neg", (value,)), unit))
        case Words(text) if meaning := _SPOKEN.get(" ".join(text.lower().split()).strip(". ")):
            return Symbol(meaning)
        # `P(1, 2)`: a point with its name is the point.
        case Apply("*", (Symbol(name), Bracket("(", ")", (_, _, *_)) as point)) if name[:1].isupper():
            return point
        # `(1, 2)^T`.
        case Apply("transpose", (inner,)):
            inner = plain(inner)
            if isinstance(inner, Matrix):
                return Matrix(tuple(zip(*inner.rows, strict=True)))
            if isinstance(inner, Bracket):
                return inner
            return Apply("transpose", (inner,))
        case Apply("*" | "+" | "neg" | "/") if any(
            isinstance(below, Matrix) or _is_vector(below) for below in children(node)
        ):
            return _matrix(node)
        case _:
            return node


def _quantity(value: Node, unit: str) -> Node:
    words = unit.split()
    while words and words[0].lower() in SCALES:
        scale = SCALES[words.pop(0).lower()]
        if scale < 1:
            value = Apply("percent", (value,))
        else:
            value = Apply("mixed", (Apply("*", (value, Number(scale))), Number(Fraction(0))))
    unit = " ".join(words)
    if unit.lower() in ("degrees", "degree", "deg"):
        return Apply("degree", (value,))
    # `5 or more`, `5 times`: what stands behind the number is no unit.
    if changes_meaning(unit):
        raise RefusedError(f"{unit!r} after the value")
    return Quantity(value, unit) if unit else value


def _is_vector(node: Node) -> bool:
    return isinstance(node, Bracket) and node.opening in "(<" and len(node.items) > 1


def _rows(node: Node) -> tuple[tuple[Node, ...], ...] | None:
    if isinstance(node, Matrix):
        return node.rows
    if isinstance(node, Bracket) and _is_vector(node):
        return tuple((item,) for item in node.items)
    return None


def _matrix(node: Apply) -> Node:
    """A scalar times a matrix, a sum of matrices or a product of two, as one matrix; anything else stays."""
    args = [plain(arg) if not _is_vector(arg) else arg for arg in node.args]
    rows = [_rows(arg) for arg in args]
    matrices = [one for one in rows if one is not None]
    # `-\begin{pmatrix}...`: a sign goes into each entry.
    if node.head == "neg" and matrices:
        return Matrix(tuple(tuple(Apply("neg", (entry,)) for entry in row) for row in matrices[0]))
    # A matrix over a scalar.
    if node.head == "/" and rows[0] is not None and rows[1] is None:
        return Matrix(tuple(tuple(Apply("/", (entry, args[1])) for entry in row) for row in rows[0]))
    # `\frac{1}{2}` times a matrix: the scalar goes into each entry.
    if node.head == "*" and len(matrices) == 1:
        scalars = tuple(arg for arg, one in zip(args, rows, strict=True) if one is None)
        return Matrix(tuple(tuple(Apply("*", (*scalars, entry)) for entry in row) for row in matrices[0]))
    if node.head == "*" and all(isinstance(arg, Matrix) for arg in node.args) and len(matrices) == 2:
        left = matrices[0]
        columns = tuple(zip(*matrices[1], strict=True))
        if len(left[0]) == len(matrices[1]) <= MAX_SIDE:
            return Matrix(tuple(tuple(_dot(row, column) for column in columns) for row in left))
    # A sum of matrices of one shape.
    if node.head == "+" and len(matrices) == len(rows) and len({(len(one), len(one[0])) for one in matrices}) == 1:
        sums = (zip(*stacked, strict=True) for stacked in zip(*matrices, strict=True))
        return Matrix(tuple(tuple(Apply("+", entries) for entries in row) for row in sums))
    return node


def _dot(row: tuple[Node, ...], column: tuple[Node, ...]) -> Node:
    return Apply("+", tuple(Apply("*", pair) for pair in zip(row, column, strict=True)))
