r"""Declarations: parts of an answer that only say what its letters are (`k \in \mathbb{Z}`, `where n is an integer`).

The rule, decided here alone: a declaration is no answer and adds nothing to one. What a letter may be is the gold's to say:
only letters that the gold declares may be renamed or shifted (`2k, k \in \mathbb{Z}` is `2n + 2, n \in \mathbb{Z}`). A
domain of the answer can only refuse it: another domain than the gold's, or one beside an inequality that has none there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlvr.verifiers.math.expression import Bracket, Builder, Node, Quantity, Relation, Symbol, symbols

NUMBER_SETS = frozenset({"Integers", "Naturals", "Rationals", "Complexes", "Reals"})

_INTEGER = re.compile(
    r"(?:is |are )?(?:(?:an|any|some|all) )?(?:arbitrary )?(positive |non-?negative )?integers?", re.I
)

Declared = frozenset[tuple[str, str]]
"""(letter, domain) of every letter that is declared."""


def is_number_set(node: Node) -> bool:
    r"""Whether the node is $\mathbb{Z}$, `\mathbb{Z}^+`, `\mathbb{R}` or another set of all numbers of a kind."""
    return isinstance(node, Symbol) and node.name.partition(" ")[0] in NUMBER_SETS


def declared_by(node: Node) -> Declared | None:
    """What the node declares, or None where it is something else than a declaration."""
    match node:
        case Relation(("in",), (names, Symbol(domain) as numbers)) if is_number_set(numbers):
            return frozenset((name, domain) for name in symbols(names))
        case Quantity(Symbol(name), unit) if (words := _INTEGER.fullmatch(unit)) is not None:
            return frozenset({(name, "Integers +" if words[1] else "Integers")})
    return None


def without_conditions(node: Node) -> tuple[Node, Declared]:
    r"""`node` without the conditions behind it (`k\pi, k \in \mathbb{Z}`, `\{2k \mid k \in \mathbb{Z}\}`), and what they declare."""
    match node:
        case Bracket("{", "}", (Builder(subject, conditions) as builder,)) if not isinstance(subject, Relation):
            if all(declared_by(condition) is not None for condition in conditions):
                node = builder
    declared: Declared = frozenset()
    while isinstance(node, Builder):
        for condition in node.conditions:
            declared |= declared_by(condition) or frozenset()
        node = node.subject
    return node, declared


def disagree(gold: Declared, answer: Declared, in_inequalities: Iterable[str]) -> bool:
    """Whether the answer's domains are not the gold's. `in_inequalities` are the letters that inequalities are about.

    Real numbers are what every letter is until something else is said.
    """
    ours, theirs = (frozenset(pair for pair in side if pair[1] != "Reals") for side in (gold, answer))
    if ours and theirs and {domain for _, domain in ours} != {domain for _, domain in theirs}:
        return True
    letters = frozenset(in_inequalities)
    return {pair for pair in ours if pair[0] in letters} != {pair for pair in theirs if pair[0] in letters}
