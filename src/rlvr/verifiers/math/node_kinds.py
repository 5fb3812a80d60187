"""The nodes of the tree that the parser builds and the comparison reads: a few kinds, all immutable."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Number:
    """A literal, exactly as written; `base` is set for a literal with a base (`101_2`), `places` counts the decimals of
    one written with a point, None for others."""

    value: Fraction
    base: int = 0
    places: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name: a letter with its subscript and primes, a Greek letter, a constant (`pi`, `e`, `i`, `infinity`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Words:
    """Text that is not mathematics."""

    text: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation: `+` and `*` (any number of arguments), `neg / ^ root log abs binom degree ...`, `call f` for an
    unknown f."""

    head: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Binder:
    """An unevaluated operator: `int sum prod lim diff`, over `variable`, with its limits and its body."""

    kind: str
    variable: str
    lower: Node | None
    upper: Node | None
    body: Node


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain `side operator side operator side`, with operators `= != < > <= >= ~ in ...`."""

    operators: tuple[str, ...]
    sides: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Bracket:
    """The content of brackets: a tuple, an interval, a set, or one grouped expression."""

    opening: str
    closing: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of entries."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Items without brackets, separated by `,`, `;`, `and` or `or`."""

    separator: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with the unit, or the prose, that follows it."""

    value: Node
    unit: str


@dataclass(frozen=True, slots=True)
class Builder:
    r"""A set by condition, `\{x \in A \mid conditions\}`; also an answer with a side condition
    (`k\pi, k \in \mathbb Z`)."""

    subject: Node
    conditions: tuple[Node, ...]


Node: TypeAlias = Number | Symbol | Words | Apply | Binder | Relation | Bracket | Matrix | Listing | Quantity | Builder
