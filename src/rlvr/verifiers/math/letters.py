r"""Reading a text as a tree, and the one question that a text alone leaves open: is a letter behind a number a unit?

The rule, decided here alone: bare letters behind a number (`5 m`, `3 kg`) are a unit where they are all that stands behind
the number of a whole value, and nothing nearby is a variable. In `49 a^2 - 49 b^2` they are variables, as everywhere in
arithmetic; so is a letter that the gold or the problem uses as a variable. Words set upright (`5 \text{ m}`) are no letters.
"""

from __future__ import annotations

import functools
import re

from rlvr.verifiers.math.expression import Apply, Bracket, Listing, Node, Quantity, Relation, Symbol, symbols, walk
from rlvr.verifiers.math.parser import parse
from rlvr.verifiers.math.tokens import Unreadable

_MAY_BE_UNIT = re.compile(r"\d\s*[A-Za-z]")
_LETTER = re.compile(r"(?<![A-Za-z\\])(?<!\d )[A-Za-z](?![A-Za-z])")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_STYLED = re.compile(r"\\[A-Za-z]+\s*\{[^{}\\]*[A-Za-z]{2}[^{}\\]*\}|\\[A-Za-z]+")
PROMPT_LENGTH = 20_000
"""Characters at the end of a prompt in which formulas are looked for."""


@functools.lru_cache(maxsize=1024)
def read(text: str, variables: frozenset[str] = frozenset()) -> Node:
    """The tree of a cleaned answer; `variables` are letters that are no units. Raises Unreadable."""
    if not _MAY_BE_UNIT.search(text):
        return parse(text)
    try:
        with_units = parse(text)
    except Unreadable:
        return parse(text, bare_units=False)
    try:
        without = parse(text, bare_units=False)
    except Unreadable:
        return with_units
    letters = symbols(without) - symbols(with_units)
    if without == with_units or not (letters & variables or any(map(_is_algebra, _values(with_units)))):
        return with_units
    return without


def _values(node: Node) -> list[Node]:
    """What stands on its own in an answer: the items of lists, the sides of relations."""
    match node:
        case Listing() | Bracket():
            return [value for item in node.items for value in _values(item)]
        case Relation():
            return [value for side in node.sides if not isinstance(side, Symbol) for value in _values(side)]
    return [node]


def _is_algebra(value: Node) -> bool:
    """Whether a value has variables, or arithmetic between its quantities."""
    if isinstance(value, Quantity):
        return _is_algebra(value.value)
    if isinstance(value, Apply) and value.head == "neg":
        return _is_algebra(value.args[0])
    return bool(symbols(value)) or any(isinstance(below, Quantity) for below in walk(value))


def units_of(node: Node) -> frozenset[str]:
    """The single letters among the units of a tree."""
    words = [
        word for below in walk(node) if isinstance(below, Quantity) for word in re.findall("[A-Za-z]+", below.unit)
    ]
    return frozenset(word for word in words if len(word) == 1)


@functools.lru_cache(maxsize=256)
def formulas(prompt: str) -> tuple[str, ...]:
    """The texts between math delimiters in a prompt, in order."""
    found = _FORMULA.findall(prompt[-PROMPT_LENGTH:])
    return tuple(formula for groups in found for formula in groups if formula.strip())


@functools.lru_cache(maxsize=256)
def variables_of(prompt: str) -> frozenset[str]:
    """The letters that the formulas of a prompt use as variables."""
    return frozenset(letter for formula in formulas(prompt) for letter in _LETTER.findall(_STYLED.sub(" ", formula)))
