r"""Declarations and conditions: parts of an answer that say what its letters are, or when it holds.

The rule, decided here alone: a declaration is no answer and adds nothing to one. What a letter may be is the gold's to
say: only letters that the gold declares may be renamed or shifted (`2k, k \in \mathbb{Z}` is
`2n + 2, n \in \mathbb{Z}`), and those that count periods, see parameters.py. A domain of the answer can only refuse it:
another domain than the gold's, or one beside an inequality that has none there.

Any other condition is part of the answer, which holds only then (`5 \text{ if } x > 0` is not 5): the gold must have
the same one. A condition of the gold may be left out. Single points that are excluded (`x \ne 1`) say where the answer
is defined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlvr.verifiers.math.expression import symbols
from rlvr.verifiers.math.node_kinds import Bracket, Builder, Node, Quantity, Relation, Symbol

NUMBER_SETS = frozenset({"Integers", "Naturals", "Rationals", "Complexes", "Reals"})

# Matches `is an integer`, `any positive integer`; not `real`.
_INTEGER = re.compile(
    r"(?:is |are )?(?:(?:an|any|some|all) )?(?:arbitrary )?(positive |non-?negative )?integers?", re.I
)

# Matches `is a real number`, `arbitrary constant`; not `is prime`.
_FREE = re.compile(
    r"(?:(?:is|are) )?(?:(?:an?|any|some|all|the) )?(?:arbitrary )?"
    r"(?:(?:real|complex) numbers?|reals?|(?:real )?constants?(?: of integration)?|parameters?)",
    re.IGNORECASE,
)
"""Words that leave a letter free."""

Declared = frozenset[tuple[str, str]]
"""(letter, domain) of every letter that is declared."""


def is_number_set(node: Node) -> bool:
    r"""Return True if the node is $\mathbb{Z}$, `\mathbb{Z}^+`, `\mathbb{R}` or another set of all numbers of a
    kind."""
    return isinstance(node, Symbol) and node.name.partition(" ")[0] in NUMBER_SETS


def declared_by(node: Node) -> Declared | None:
    """Return the letters that the node declares with their domains, or None if it is no declaration."""
    match node:
        case Relation(("in",), (names, Symbol(domain) as numbers)) if is_number_set(numbers):
            return frozenset((name, domain) for name in symbols(names))
        case Quantity(Symbol(name), unit) if (words := _INTEGER.fullmatch(unit)) is not None:
            return frozenset({(name, "Integers +" if words[1] else "Integers")})
        case Quantity(Symbol(), unit) if _FREE.fullmatch(unit):
            return frozenset()
    return None


def without_conditions(node: Node) -> tuple[Node, Declared, tuple[Node, ...]]:
    r"""`node` without the conditions behind it (`k\pi, k \in \mathbb{Z}`, `\{2k \mid k \in \mathbb{Z}\}`), what they
    declare, and those that restrict it."""
    match node:
        case Bracket("{", "}", (Builder(subject, conditions) as builder,)) if not isinstance(subject, Relation):
            if all(declared_by(condition) is not None for condition in conditions):
                node = builder
    declared: Declared = frozenset()
    restrictions: list[Node] = []
    while isinstance(node, Builder):
        for condition in node.conditions:
            declaration = declared_by(condition)
            declared |= declaration or frozenset()
            # `for all x`, `x \ne 1`: it restricts nothing but single points.
            says_nothing = isinstance(condition, Symbol) or (
                isinstance(condition, Relation) and set(condition.operators) == {"!="}
            )
            if declaration is None and not says_nothing:
                restrictions.append(condition)
        node = node.subject
    return node, declared, tuple(restrictions)


def disagree(
    gold: Declared, answer: Declared, in_inequalities: Iterable[str], letters: tuple[frozenset[str], frozenset[str]]
) -> bool:
    """Return True if the answer's domains are not the gold's. `in_inequalities` are the letters that inequalities are
    about, `letters` those of the gold's values and of the answer's.

    A letter that both declare has one domain, and so have those that only one of them writes, which are the same by
    another name. Real numbers are what every letter is until something else is said.
    """
    ours = _domains(gold)
    theirs = _domains(answer)
    if any(domains != theirs.get(name, domains) for name, domains in ours.items()):
        return True
    renamed = (
        {domain for name, domain in gold if name in letters[0] - letters[1]},
        {domain for name, domain in answer if name in letters[1] - letters[0]},
    )
    if all(renamed) and renamed[0] - {"Reals"} != renamed[1] - {"Reals"}:
        return True
    about = frozenset(in_inequalities)
    domains = [{pair for pair in side if pair[0] in about and pair[1] != "Reals"} for side in (gold, answer)]
    return domains[0] != domains[1]


def _domains(declared: Declared) -> dict[str, set[str]]:
    """The domains of each letter; that it is real says nothing beside another one."""
    domains: dict[str, set[str]] = {}
    for name, domain in declared:
        domains.setdefault(name, set()).add(domain)
    return {name: kinds - {"Reals"} or kinds for name, kinds in domains.items()}
