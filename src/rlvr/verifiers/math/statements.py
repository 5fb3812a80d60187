r"""Statements of an answer: the values it gives, each with the label it gives it.

`x = 2 \text{ or } x = 3`, `x \in \{2, 3\}`, `2, 3` and `\{3, 2\}` all give two values; `x = 2, y = 3` gives two labels
one value each. Plus-minus becomes two values. A chain of equalities must be true, or the answer is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlvr.verifiers.math.approximations import is_rounded, is_rounding_pair
from rlvr.verifiers.math.declarations import Declared, declared_by, without_conditions
from rlvr.verifiers.math.expression import INEQUALITIES, is_integer_literal, rebuild, symbols, walk
from rlvr.verifiers.math.node_kinds import (
    Apply,
    Binder,
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
from rlvr.verifiers.math.plain_form import RefusedError, plain
from rlvr.verifiers.math.point_sampling import PointSampler
from rlvr.verifiers.math.units import conversion

# Each sign doubles the values: three make eight.
MAX_SIGNS = 3
"""Independent plus-minus signs in one value."""


# Matches `x`, `a_12`; not `xy`, `x_n`.
_LETTER = re.compile(r"([A-Za-z])(?:_(\d{1,3}))?")


@dataclass(frozen=True)
class StatementEntry:
    """One value: its label (an expression that stands for what was asked), the value, and a rounded form of it."""

    value: Node
    label: Node | None = None
    rounded: Node | None = None
    conditions: tuple[Node, ...] = ()
    """Conditions under which it holds."""

    @property
    def unlabelled(self) -> StatementEntry:
        return StatementEntry(self.value, None, self.rounded)


@dataclass(frozen=True)
class Statement:
    """All that an answer gives."""

    entries: tuple[StatementEntry, ...]
    is_set: bool = False
    """True if it was written as a set: order and repetitions mean nothing."""
    joined: str = ","
    """The separator of the entries."""
    declared: Declared = frozenset()
    """Declarations of letters beside the values: (k, Integers)."""


def read_statement(node: Node, sampler: PointSampler) -> Statement:
    """The statement that a tree makes; raises RefusedError for a false equality."""
    node, declared, general = _without_conditions(plain(node))
    items = []
    for part in node.items if isinstance(node, Listing) else (node,):
        declaration = declared_by(part)
        if declaration is None:
            items.append(part)
        declared |= declaration or frozenset()
    # `p = 5, q = 2; p = 7, q = 3`: groups, each of which is one tuple.
    if isinstance(node, Listing) and node.separator == ";":
        items = [_grouped(part, sampler) for part in items]
    else:
        items = _with_conditions(items)
    entries: list[StatementEntry] = []
    is_set = False
    label = None
    for item in items or [node]:
        item, declarations, outer = _without_conditions(item)
        declared |= declarations
        entry = read_entry(item, sampler)
        value, declarations, inner = _without_conditions(entry.value)
        declared |= declarations
        entry = replace(entry, value=value, conditions=general + outer + inner)
        # `x = 2, 3`: the label of the first value is that of the next ones.
        if entry.label is None and label is not None and not isinstance(entry.value, (Relation, Words)):
            entry = replace(entry, label=label)
        label = entry.label
        values = _members(entry.value)
        is_set = is_set or (values is not None and len(items) == 1)
        for value in (entry.value,) if values is None else values:
            signs = expand_signs(value)
            entries.extend(
                replace(entry, value=one, rounded=entry.rounded if values is None and len(signs) == 1 else None)
                for one in signs
            )
    separator = node.separator if isinstance(node, Listing) else ","
    return Statement(tuple(_cycled(entries)), is_set, separator, declared)


def _without_conditions(node: Node) -> tuple[Node, Declared, tuple[Node, ...]]:
    bare, declared, conditions = without_conditions(node)
    return (node if bare is node else plain(bare)), declared, conditions


def _with_conditions(items: list[Node]) -> list[Node]:
    r"""Items with the inequalities behind them that are about letters of their values: `2^k, k \ge 1` is `2^k` where
    `k \ge 1`."""
    merged: list[Node] = []
    for item in items:
        if merged and _restricts(item, merged[-1]):
            merged[-1] = Builder(merged[-1], (item,))
        else:
            merged.append(item)
    return merged


def _restricts(condition: Node, subject: Node) -> bool:
    """Return True if an inequality restricts letters of the value before it; beside another inequality it is a second
    answer."""
    if isinstance(subject, Builder):
        return _restricts(condition, subject.subject)
    if not (isinstance(condition, Relation) and set(condition.operators) <= INEQUALITIES):
        return False
    value: Node = subject
    if isinstance(subject, Relation) and set(subject.operators) == {"="} and is_label(subject.sides[0]):
        value = subject.sides[-1]
    letters = symbols(condition)
    return bool(letters) and letters <= symbols(value) and not isinstance(value, (Relation, Symbol))


def _cycled(entries: list[StatementEntry]) -> list[StatementEntry]:
    """`x=1, y=2 or x=2, y=1` as two tuples: labels that come round in the same order."""
    labels = [entry.label for entry in entries]
    period = next((k for k in range(1, len(labels)) if labels[k] == labels[0]), 0)
    # `x = 1 or x = 2` has period 1: two values of one label, no tuples.
    if period < 2 or None in labels or len(labels) % period or labels != labels[:period] * (len(labels) // period):
        return entries
    return [as_tuple(entries[at : at + period]) for at in range(0, len(entries), period)]


def _grouped(node: Node, sampler: PointSampler) -> Node:
    """`p=5, q=2`, one of several groups, as the tuple (5, 2)."""
    if not isinstance(node, Listing):
        return node
    entry = as_tuple([read_entry(item, sampler) for item in node.items])
    if entry.label is not None:
        return Relation(("=",), (entry.label, entry.value))
    return entry.value


def as_tuple(entries: Sequence[StatementEntry]) -> StatementEntry:
    """Entries as one tuple, whose label is that of their labels where all of them have one."""
    values = Bracket("(", ")", tuple(entry.value for entry in entries))
    labels = tuple(entry.label for entry in entries if entry.label is not None)
    label = Bracket("(", ")", labels) if len(labels) == len(entries) else None
    return StatementEntry(values, label, conditions=tuple(one for entry in entries for one in entry.conditions))


def permuted(entry: StatementEntry, labels: Sequence[Node] = ()) -> StatementEntry:
    """A labelled tuple (`(y, x) = (1, 2)`) in the order of `labels`, a permutation of its own; else in that of the
    alphabet."""
    label = entry.label
    value = entry.value
    if not (isinstance(label, Bracket) and isinstance(value, Bracket)) or len(label.items) != len(value.items):
        return entry
    if value.opening not in "(<[" or len(label.items) < 2:
        return entry
    wanted = labels or _alphabet(label.items)
    if wanted is None or set(wanted) != set(label.items):
        return entry
    order = [label.items.index(name) for name in wanted]
    return replace(entry, label=_picked(label, order), value=_picked(value, order), rounded=None)


def _picked(tuple_: Bracket, order: list[int]) -> Bracket:
    return Bracket(tuple_.opening, tuple_.closing, tuple(tuple_.items[at] for at in order))


def alphabetical(statement: Statement) -> Statement:
    """The statement with its labelled values in the order of the alphabet, which is that of an unlabelled gold
    (`(1, 2)`)."""
    entries = tuple(permuted(entry) for entry in statement.entries)
    wanted = _alphabet([entry.label for entry in entries])
    if wanted is not None:
        entries = tuple(sorted(entries, key=lambda entry: wanted.index(entry.label)))
    return replace(statement, entries=entries)


def _alphabet(labels: Sequence[Node | None]) -> list[Node | None] | None:
    """The labels in the order of the alphabet; None where they are not different Latin letters, which may have a
    number."""
    letters = [_LETTER.fullmatch(label.name) if isinstance(label, Symbol) else None for label in labels]
    if len(set(labels)) != len(labels):
        return None
    keys = [(letter[1].casefold(), int(letter[2] or 0)) for letter in letters if letter is not None]
    if len(keys) != len(labels):
        return None
    return [label for _, label in sorted(zip(keys, labels, strict=True), key=lambda pair: pair[0])]


def with_residues(node: Node) -> Node:
    r"""A tree whose values `2 \bmod 3` are residue classes, for comparison with one: `2 \pmod 3`.

    In a list the last modulus is that of all congruences before it: `n \equiv 1, 2 \pmod 4`.
    """
    match node:
        # `2 mod 3` beside a residue class is meant as one; alone it is the number 2.
        case Apply("mod", args):
            return Apply("pmod", args)
        case Bracket("(", ")", (item,)):
            return with_residues(item)
        case Relation(operators, sides):
            return Relation(operators, tuple(map(with_residues, sides)))
        case Listing(separator, items):
            items = tuple(map(with_residues, items))
            match items[-1]:
                case Apply("pmod", (_, modulus)) | Relation(sides=(*_, Apply("pmod", (_, modulus)))):
                    return Listing(separator, tuple(_modulo(item, modulus) for item in items))
            return Listing(separator, items)
    return node


def _modulo(node: Node, modulus: Node) -> Node:
    """An integer or a congruence that has no modulus with this one."""
    if isinstance(node, Relation) and node.operators == ("equiv",):
        return Relation(node.operators, (node.sides[0], _modulo(node.sides[1], modulus)))
    if is_integer_literal(node):
        return Apply("pmod", (node, modulus))
    return node


def is_set(node: Node) -> bool:
    """Return True if a node is written as a set."""
    return node == Symbol("emptyset") or (isinstance(node, Bracket) and node.opening == "{")


def _members(node: Node) -> tuple[Node, ...] | None:
    """The members of a finite set that are no sets themselves: a set of sets is one value."""
    if isinstance(node, Bracket) and node.opening == "{" and node.items and not isinstance(node.items[0], Builder):
        # `\{\{1\}, \{2\}\}` is one answer, not two.
        return None if any(map(is_set, node.items)) else node.items
    if isinstance(node, Apply) and node.head == "cup":
        parts = [_members(part) for part in node.args]
        if all(part is not None for part in parts):
            return tuple(member for part in parts if part is not None for member in part)
    return None


def read_entry(node: Node, sampler: PointSampler) -> StatementEntry:
    """The label and the value of one item."""
    node = plain(node)
    if not isinstance(node, Relation):
        return StatementEntry(node)
    # `x \in \{1, 2\}`, `n \equiv 2 \pmod 3`.
    is_tuple_in = node.operators == ("in",) and isinstance(node.sides[0], Bracket)
    if is_tuple_in or (node.operators in (("in",), ("equiv",)) and is_label(node.sides[0])):
        return StatementEntry(plain(node.sides[1]), node.sides[0])
    if not set(node.operators) <= {"=", "~", "to"} or node.operators[0] == "to":
        return StatementEntry(node)
    sides = list(node.sides)
    operators = list(node.operators)
    label = None
    if (isinstance(sides[0], Binder) and not isinstance(sides[-1], Binder)) or (
        is_label(sides[0]) and _names(sides[0], sides[1:], sampler)
    ):
        label = sides[0]
        sides = sides[1:]
        operators = operators[1:]
    # `5 = x`: the label on the right.
    elif len(sides) == 2 and is_label(sides[1]) and not symbols(sides[0]):
        label = sides[1]
        sides = sides[:1]
        operators = []
    # `2x + y = 3` names nothing: the equation itself is the value.
    elif symbols(node) and len(sides) == 2 and operators == ["="]:
        return StatementEntry(node)
    return _chain(label, [plain(side) for side in sides], operators, sampler)


def _chain(label: Node | None, sides: list[Node], operators: list[str], sampler: PointSampler) -> StatementEntry:
    """`a = b = c` gives c where all agree; what an approximation sign joins is a value and its rounding.

    An equation that is true by itself (`1 = 1`) gives nothing.
    """
    # `1 = 1`: true, and no answer.
    if label is None and len(sides) > 1 and len(set(sides)) == 1:
        raise RefusedError("both sides of the equation are the same")
    value = sides[0]
    rounded = None
    for operator, side in zip(operators, sides[1:], strict=True):
        if operator == "=":
            last = value if rounded is None else rounded
            # `f(x) = y = 5`: both sides name what was asked, so that the chain goes on with the last.
            if rounded is None and is_label(side) and is_label(value):
                value = side
                continue
            if sampler.equal(last, _in_units_of(last, side)) is not True:
                raise RefusedError("the sides of a chain of equalities differ")
            value, rounded = (side, None) if rounded is None else (value, side)
        elif is_rounding_pair(value, _in_units_of(value, side), sampler) and (
            rounded is None or is_rounded(rounded, _in_units_of(rounded, side), sampler)
        ):
            rounded = side
        else:
            raise RefusedError("two values are joined by an approximation sign, and neither is the other one rounded")
    return StatementEntry(value, label, rounded)


def _in_units_of(one: Node, other: Node) -> Node:
    """`other` in the unit of `one`, where both state one; raises RefusedError where the units disagree
    (`5 m = 5 cm`)."""
    if not (isinstance(one, Quantity) and isinstance(other, Quantity)):
        return other
    factor = conversion(one.unit, other.unit)
    if factor is None:
        raise RefusedError("the sides of a chain have different units")
    if factor == 1:
        return other
    return Apply("*", (other.value, Number(factor)))


def _names(label: Node, values: Sequence[Node], sampler: PointSampler) -> bool:
    """Return True if a left side names the values: it does not occur in them (`x = x + 1` states an equation), but for
    an identity (`\\tan x = \\frac{\\sin x}{\\cos x}`)."""
    match label:
        case Apply("*", (*_, Bracket("(", ")", arguments))):
            names = symbols(label) - frozenset().union(*map(symbols, arguments))
        case Apply(head) if head.startswith("call "):
            names = frozenset()
        case _:
            names = symbols(label)
    shared = [value for value in values if names & symbols(value)]
    return all(sampler.equal(label, value) is True for value in shared)


def is_label(node: Node) -> bool:
    r"""Return True if a left side only names what was asked: `x`, `f(x)`, `AB`, `(x, y)`, `\sin\theta`, `\angle ABC`,
    `\text{Area}`, `A : B`."""
    match node:
        case Symbol():
            return bool(symbols(node))
        case Words():
            return True
        # `f^{-1}(x)`.
        case Apply("*", (Apply("^", (Symbol(), Apply("neg", (Number(),)))), Bracket("(", ")", (Symbol(),)))):
            return True
        case Apply("*", args) if len(args) == 2 and isinstance(args[1], Bracket):
            return isinstance(args[0], Symbol) and bool(symbols(args[0]))
        case Apply("*", args):
            return all(
                isinstance(arg, Symbol) and (arg.name[:1].isupper() or " " in arg.name or arg.name == "m")
                for arg in args
            )
        case Apply("/" | ":" | "abs" | "sin" | "cos" | "tan" | "cot" | "degree" | "log" | "ln" | "det", args):
            return all(is_label(arg) for arg in args)
        # `\sin^2 x`.
        case Apply("^", (Apply("sin" | "cos" | "tan") as function, Number())):
            return is_label(function)
        case Apply(head):
            return head.startswith("call ") or head == "mean"
        case Bracket("(", ")" | "]", items) | Bracket("[", "]", items):
            return bool(items) and all(is_label(item) for item in items)
        # `x \text{ apples} = 5`.
        case Quantity(value=value):
            return is_label(value)
        case _:
            return False


def expand_signs(node: Node) -> list[Node]:
    r"""The values that plus-minus signs stand for; the signs are independent unless a `\mp` ties them together."""
    signs = [below for below in walk(node) if isinstance(below, Apply) and below.head in ("pm", "mp")]
    if not signs:
        return [node]
    if len(signs) > MAX_SIGNS:
        raise RefusedError("too many plus-minus signs")
    # `\pm a \mp b`: upper signs together, lower signs together, two values.
    if any(sign.head == "mp" for sign in signs):
        return [_signed(node, iter([plus if s.head == "pm" else not plus for s in signs])) for plus in (True, False)]
    choices = [[bool(number >> place & 1) for place in range(len(signs))] for number in range(2 ** len(signs))]
    return [_signed(node, iter(choice)) for choice in choices]


def _signed(node: Node, choice) -> Node:  # type: ignore[no-untyped-def]
    if isinstance(node, Apply) and node.head in ("pm", "mp"):
        positive = next(choice)
        *first, last = [_signed(arg, choice) for arg in node.args]
        last = last if positive else Apply("neg", (last,))
        return Apply("+", (*first, last)) if first else last
    # An integral or a sum with plus-minus inside is one value: its body is not split.
    if isinstance(node, Binder):
        return node
    return rebuild(node, lambda child: _signed(child, choice))
