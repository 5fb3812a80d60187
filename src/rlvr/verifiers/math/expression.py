"""Functions of trees: their children, symbols, depth, copies with changes, and the numbers that they write.

Invariant: a tree from the parser has at most `parser.MAX_DEPTH` levels and as many nodes as its text has tokens, so
that every function here may recurse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from rlvr.verifiers.math.node_kinds import (
    Apply,
    Binder,
    Bracket,
    Builder,
    Listing,
    Matrix,
    Node,
    Number,
    Quantity,
    Relation,
    Symbol,
)

CONSTANTS = frozenset(
    {"pi", "e", "i", "infinity", "Reals", "Integers", "Naturals", "Rationals", "Complexes", "emptyset"}
)

INEQUALITIES = frozenset({"<", ">", "<=", ">=", "!="})
COMPARED = INEQUALITIES | {"="}
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
"""Operators of relations, read from right to left."""

MAX_EXPONENT = 1000
"""Size of a decimal exponent beyond which a literal is not worked out."""


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below, in order."""
    match node:
        case Apply():
            return node.args
        case Relation():
            return node.sides
        case Bracket() | Listing():
            return node.items
        case Matrix():
            return tuple(entry for row in node.rows for entry in row)
        case Binder():
            return (*(limit for limit in (node.lower, node.upper) if limit is not None), node.body)
        case Quantity():
            return (node.value,)
        case Builder():
            return (node.subject, *node.conditions)
        case _:
            return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for child in children(node):
        yield from walk(child)


def rebuild(node: Node, change: Callable[[Node], Node]) -> Node:
    """`node` with `change` applied to each node directly below."""
    match node:
        case Apply():
            return Apply(node.head, tuple(map(change, node.args)))
        case Relation():
            return Relation(node.operators, tuple(map(change, node.sides)))
        case Bracket() | Listing():
            return replace(node, items=tuple(map(change, node.items)))
        case Matrix():
            return Matrix(tuple(tuple(map(change, row)) for row in node.rows))
        case Binder():
            lower, upper = (None if limit is None else change(limit) for limit in (node.lower, node.upper))
            return Binder(node.kind, node.variable, lower, upper, change(node.body))
        case Quantity():
            return Quantity(change(node.value), node.unit)
        case Builder():
            return Builder(change(node.subject), tuple(map(change, node.conditions)))
        case _:
            return node


def symbols(node: Node) -> frozenset[str]:
    """The free symbols, less the constants."""
    if isinstance(node, Symbol):
        if node.name.partition(" ")[0] in CONSTANTS:
            return frozenset()
        return frozenset({node.name})
    below = [symbols(child) for child in children(node)]
    free = frozenset().union(*below)
    if isinstance(node, Binder) and binds(node):
        limits = [symbols(limit) for limit in (node.lower, node.upper) if limit is not None]
        free = frozenset().union(*limits) | (symbols(node.body) - {node.variable})
    return free


def binds(node: Binder) -> bool:
    """Return True if the variable is a name of the operator's own; that of a derivative or an antiderivative is not."""
    return node.kind != "diff" and not (node.kind.endswith("int") and node.lower is None)


def rename(node: Node, names: dict[str, str]) -> Node:
    """`node` with symbols renamed, all at once."""
    if isinstance(node, Symbol):
        return Symbol(names.get(node.name, node.name))
    renamed = rebuild(node, lambda child: rename(child, names))
    if isinstance(renamed, Binder):
        return replace(renamed, variable=names.get(renamed.variable, renamed.variable))
    return renamed


def replaced(node: Node, names: Mapping[str, Node]) -> Node:
    """`node` with expressions for symbols, all at once."""
    if isinstance(node, Symbol):
        return names.get(node.name, node)
    return rebuild(node, lambda child: replaced(child, names))


def depth(node: Node) -> int:
    """Levels of the tree."""
    return 1 + max(map(depth, children(node)), default=0)


def is_literal(node: Node) -> bool:
    r"""Return True if the node is a number in readable form: `-3`, `2.5`, `\frac{1}{2}`, `50\%`, `1.5 \times 10^{3}`;
    not `6 \cdot 7`."""
    match node:
        case Number():
            return node.base == 0
        case Apply("neg" | "percent" | "degree", (arg,)) | Bracket(items=(arg,)) | Quantity(value=arg):
            return is_literal(arg)
        case Apply("/", (top, bottom)):
            return is_literal(top) and is_literal(bottom)
        case Apply("mixed"):
            return True
        case Apply("*", (Number(), power)):
            return _is_power_of_ten(power)
        case _:
            return _is_power_of_ten(node)


def as_decimal(node: Node) -> Number | None:
    """The decimal, with its sign, that a node is as written (`-1.50`), or None."""
    match node:
        case Number(base=0):
            return node if node.places is not None else None
        case Apply("neg", (arg,)):
            inner = as_decimal(arg)
            return None if inner is None else replace(inner, value=-inner.value)
        case Bracket("(" | "[", ")" | "]", (item,)):
            return as_decimal(item)
        case Apply("*", (Number(value, places=int(places)), Apply("^", (Number(), power)) as scale)) if (
            _is_power_of_ten(scale)
        ):
            exponent = int(rational(power) or 0)
            if abs(exponent) > MAX_EXPONENT:
                return None
            return Number(value * Fraction(10) ** exponent, places=places - exponent)
        case _:
            return None


def is_integer_literal(node: Node) -> bool:
    """Return True if the node is an integer as written, with a sign perhaps."""
    match node:
        case Number():
            return node.value.denominator == 1 and node.base == 0
        case Apply("neg", (arg,)) | Bracket("(", ")", (arg,)):
            return is_integer_literal(arg)
        case _:
            return False


def rational(node: Node) -> Fraction | None:
    """The value of a fraction of integers as written, with signs and brackets; None for anything else."""
    match node:
        case Number(value):
            return value
        case Bracket(items=(item,)):
            return rational(item)
        case Apply("neg", (arg,)):
            inner = rational(arg)
            return None if inner is None else -inner
        case Apply("/", (top, bottom)):
            above = rational(top)
            below = rational(bottom)
            if above is None or not below:
                return None
            return above / below
    return None


def difference(relation: Relation) -> Node:
    """The left side of an equation or inequality minus its right side."""
    left, right = relation.sides
    return Apply("+", (left, Apply("neg", (right,))))


def _is_power_of_ten(node: Node) -> bool:
    return (
        isinstance(node, Apply)
        and node.head == "^"
        and node.args[0] == Number(Fraction(10))
        and is_integer_literal(node.args[1])
    )
