"""Definitions: the function and the variables of a label like `f(x)`, and one naming of the variables for both sides.

The rule, decided here alone: the variables of a definition may have any names, in the value, the label and the
conditions.
"""

from __future__ import annotations

from dataclasses import replace

from rlvr.verifiers.math.expression import rename, symbols
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Builder, Listing, Node, Relation, Symbol


def with_variables_of(gold: Node, answer: Node) -> Node:
    """`answer` with the variables of its definitions (`f(x) = x^2, x > 0`) named as in those of the gold
    (`f(t) = ...`).

    A definition goes on in what stands behind it, up to the next one.
    """
    wanted = dict(filter(None, map(_defined_by, _items(gold))))
    groups: list[list[Node]] = [[]]
    for item in _items(answer):
        if _defined_by(item) is not None:
            groups.append([])
        groups[-1].append(item)
    items: list[Node] = []
    for group in groups:
        function, theirs = (_defined_by(group[0]) if group else None) or ("", [])
        ours = wanted.get(function, [])
        used = frozenset().union(*map(symbols, group))
        if ours != theirs and len(ours) == len(theirs) and not (used - set(theirs)) & set(ours):
            names = dict(zip(theirs, ours, strict=True))
            group = [rename(item, names) for item in group]
        items += group
    if isinstance(answer, Listing):
        return replace(answer, items=tuple(items))
    return items[0]


def _items(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Listing):
        return node.items
    return (node,)


def _defined_by(item: Node) -> tuple[str, list[str]] | None:
    """The function that an item defines, and its variables; None for anything else."""
    match item:
        case Builder(subject):
            return _defined_by(subject)
        case Relation(("=", *_), (label, *_)) if variables := arguments_of(label):
            return function_of(label), variables
    return None


def function_of(label: Node) -> str:
    """The name of the function or sequence in `f(x)`, `P(x)`, `a_n`."""
    match label:
        case Apply("*", (Symbol(name), *_)):
            return name
        case Apply(head):
            return head.removeprefix("call ")
        case Symbol(name):
            return name.partition("_")[0]
    return ""


def arguments_of(label: Node) -> list[str]:
    """The variables of `f(x)`; empty for a label that is no call."""
    match label:
        case Apply("*", (Symbol(), Bracket("(", ")", items))):
            arguments = items
        case Apply(head, items) if head.startswith("call "):
            arguments = items
        case Symbol(name) if len(name.partition("_")[2]) == 1 and name[-1].isalpha():
            return [name[-1]]
        case _:
            return []
    return [item.name for item in arguments if isinstance(item, Symbol) and symbols(item)]
