r"""The comparison of two values: numbers with units, words, tuples and matrices, ratios and residues, expressions.

The gold decides the form: where it is a plain number, arithmetic is no answer, and where it has no operator left to
work out, none is allowed. What no rule here allows is not equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from rlvr.verifiers.math.declarations import is_number_set
from rlvr.verifiers.math.expression import is_integer_literal, is_literal, symbols, walk
from rlvr.verifiers.math.guarded_arithmetic import UnknownValueError
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
    Words,
)
from rlvr.verifiers.math.parameters import Parameters, Substitution
from rlvr.verifiers.math.plain_form import plain
from rlvr.verifiers.math.point_sampling import PointSampler
from rlvr.verifiers.math.realsets import RealSets
from rlvr.verifiers.math.rules import Rules
from rlvr.verifiers.math.statements import StatementEntry, read_entry
from rlvr.verifiers.math.units import conversion

_COMPOSED = frozenset(["pmod", "cases", ":", "time", "cup", "cap", "minus"])
Rows = tuple[tuple[Node, ...], ...]
_ZERO = Number(Fraction(0))
_SETS_OF_NUMBERS = frozenset(
    map(Symbol, ("Reals", "Integers", "Naturals", "Rationals", "Complexes", "emptyset", "undefined"))
)


class Values(ABC):
    """Compares values under `rules`; holds the sampler, and with it the fuel of one comparison."""

    def __init__(self, rules: Rules, sampler: PointSampler) -> None:
        self.rules = rules
        self.sampler = sampler
        sampler.tolerance = rules.tolerance
        self.sets = RealSets(sampler, rules.require_simplified)
        self.parameters = Parameters()
        self._is_whole = False
        """True while the compared values are parts of one value, in which each letter stands for one thing."""

    def value(self, gold: Node, answer: Node) -> bool | None:
        return self.entries(StatementEntry(plain(gold)), StatementEntry(plain(answer)))

    def as_one(
        self, gold: Sequence[Node], answer: Sequence[Node], compare: Callable[[Substitution], bool | None]
    ) -> bool | None:
        """Return the result of `compare` with the letters of the answer as written, or with one substitution of its
        parameters for all these values, see parameters.py."""
        if self._is_whole:
            return compare({})
        self._is_whole = True
        try:
            same = compare({})
            if same is False and any(
                compare(letters) for letters in self.parameters.substitutions(gold, answer, self.sampler)
            ):
                return True
            return same
        finally:
            self._is_whole = False

    def same(self, gold: Node, answer: Node) -> bool | None:
        """Return True if two values are the same, False if they are not; None where that cannot be decided."""
        if gold == answer:
            return True
        if isinstance(gold, Quantity) or isinstance(answer, Quantity):
            return self._quantities(gold, answer)
        if (
            isinstance(gold, Binder) != isinstance(answer, Binder)
            and self.rules.require_simplified
            and not _has_operator(gold)
        ):
            return False
        # `\text{(B)}` and `B`; words equal nothing but words.
        if isinstance(gold, Words) or isinstance(answer, Words):
            return _spoken(gold) == _spoken(answer)
        if isinstance(gold, (Matrix, Bracket)) or isinstance(answer, (Matrix, Bracket)):
            return self._containers(gold, answer)
        gold = _set_difference(gold)
        answer = _set_difference(answer)
        if isinstance(gold, (Relation, Listing, Builder)) or isinstance(answer, (Relation, Listing, Builder)):
            return False
        for head in ("percent", "degree"):
            marked = [isinstance(side, Apply) and side.head == head for side in (gold, answer)]
            if any(marked):
                return self._marked(head, gold, answer, marked)
        if {head_of(gold), head_of(answer)} & _COMPOSED:
            return self._composed(gold, answer)
        return self._expressions(gold, answer)

    def _expressions(self, gold: Node, answer: Node) -> bool | None:
        # Infinity equals nothing but itself, and has no value to sample.
        if _infinite(gold) or _infinite(answer):
            return _infinite(gold) == _infinite(answer)
        if gold in _SETS_OF_NUMBERS or answer in _SETS_OF_NUMBERS or is_number_set(gold) or is_number_set(answer):
            return False
        if self.rules.require_simplified:
            # `\int_0^1 2x dx` where the gold is x^2: an operator that is left to work out.
            if _has_operator(answer) and not _has_operator(gold):
                return False
            # `6 \cdot 7` for 42.
            if is_literal(gold) and not is_literal(answer):
                return False
            # `84/2` for 42.
            if is_integer_literal(gold) and head_of(answer) == "/":
                return False
            # `101_2` is 5, but not the answer where the base is asked for.
            if _based(gold) != _based(answer):
                return False
        same = self.sampler.equal(gold, answer)
        if same or symbols(gold) == symbols(answer):
            return same
        return False

    def _quantities(self, gold: Node, answer: Node) -> bool | None:
        """Units convert where both are known; one side may leave its unit out."""
        one, other = (side if isinstance(side, Quantity) else Quantity(side, "") for side in (gold, answer))
        factor = conversion(one.unit, other.unit, self.rules.nouns)
        if factor is None:
            return False
        if factor == 1:
            return self.same(one.value, other.value)
        if self.rules.require_simplified and is_literal(one.value) and not is_literal(other.value):
            return False
        return self.sampler.equal(one.value, Apply("*", (other.value, Number(factor))))

    def _marked(self, head: str, gold: Node, answer: Node, marked: list[bool]) -> bool | None:
        """A percent or degree sign on one side may have been left out by the other, or worked out."""
        bare = [
            side.args[0] if isinstance(side, Apply) and has else side
            for side, has in zip((gold, answer), marked, strict=True)
        ]
        if all(marked) or (same := self.same(bare[0], bare[1])):
            return self.same(bare[0], bare[1])
        if head == "degree" and not any(
            isinstance(n, Symbol) and n.name == "pi" for n in walk(bare[0] if marked[1] else bare[1])
        ):
            return same
        return self.sampler.equal(gold, answer)

    def _composed(self, gold: Node, answer: Node) -> bool | None:
        """Ratios, residue classes, cases, sets that are no sets of reals: part by part."""
        heads = head_of(gold), head_of(answer)
        if isinstance(gold, Apply) and isinstance(answer, Apply) and heads[0] == heads[1]:
            if heads[0] == "pmod":
                return self._residues(gold, answer)
            if len(gold.args) != len(answer.args):
                return False
            if heads[0] == ":":
                return self._ratios(gold, answer)
            return all_of(self.value(a, b) for a, b in zip(gold.args, answer.args, strict=True))
        # `2` for `2 \pmod 3`.
        if heads[0] == "pmod" and isinstance(gold, Apply):
            return self.same(gold.args[0], answer)  # the modulus, like a unit, may be left out; it may not be added
        # `1/2` for `1:2`.
        if ":" in heads and "/" in heads:
            return self.sampler.equal(gold, answer)
        return False

    def _ratios(self, gold: Apply, answer: Apply) -> bool | None:
        """Part by part, or in proportion where neither can be a time of day (`3:30`)."""
        same = all_of(self.value(a, b) for a, b in zip(gold.args, answer.args, strict=True))
        if (
            same
            or any(self.sampler.equal(part, _ZERO) is not False for part in (*gold.args, *answer.args))
            or all(10 <= ratio.args[1].value < 60 for ratio in (gold, answer) if isinstance(ratio.args[1], Number))
        ):
            return same
        return all_of(
            self.sampler.equal(Apply("*", (gold.args[0], other)), Apply("*", (answer.args[0], one)))
            for one, other in zip(gold.args[1:], answer.args[1:], strict=True)
        )

    def _residues(self, gold: Apply, answer: Apply) -> bool | None:
        (one, modulus) = gold.args
        (other, other_modulus) = answer.args
        if not self.sampler.equal(modulus, other_modulus):
            return False
        try:
            values = [self.sampler.value(node) for node in (one, other, modulus)]
        except UnknownValueError:
            return self.same(one, other)
        if not all(isinstance(value, Fraction) for value in values) or values[2] == 0:
            return self.same(one, other)
        return (values[0] - values[1]) % values[2] == 0

    def _containers(self, gold: Node, answer: Node) -> bool | None:
        """Tuples, vectors, matrices, intervals, nested sets."""
        one = _rows(gold, isinstance(answer, Matrix))
        other = _rows(answer, isinstance(gold, Matrix))
        if one is not None and other is not None:
            # `(1, 2)` for a matrix of one row or column.
            if isinstance(answer, Bracket) != isinstance(gold, Bracket):
                one, other = _as_column(one, other), _as_column(other, one)
            if [len(row) for row in one] != [len(row) for row in other]:
                return False
            return all_of(self.value(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
        if not isinstance(gold, Bracket) or not isinstance(answer, Bracket):
            return False
        if gold.opening == answer.opening == "{":
            return self.unordered(
                [read_entry(i, self.sampler) for i in gold.items], [read_entry(i, self.sampler) for i in answer.items]
            )
        if (gold.opening, gold.closing) != (answer.opening, answer.closing) or len(gold.items) != len(answer.items):
            return False
        return all_of(self.value(a, b) for a, b in zip(gold.items, answer.items, strict=True))

    @abstractmethod
    def entries(self, gold: StatementEntry, answer: StatementEntry) -> bool | None:
        """Return True if two labelled values are the same: the judge above this class knows labels and relations."""

    @abstractmethod
    def unordered(self, gold: Sequence[StatementEntry], answer: Sequence[StatementEntry]) -> bool | None:
        """Return True if two sets of entries are the same."""


def all_of(results: Iterable[bool | None]) -> bool | None:
    """False where one is, else None where one is, else True; stops at the first False."""
    unsure = False
    for result in results:
        if result is False:
            return False
        unsure = unsure or result is None
    return None if unsure else True


def head_of(node: Node) -> str:
    """The operation of a node, or an empty text."""
    return node.head if isinstance(node, Apply) else ""


def _set_difference(node: Node) -> Node:
    r"""A difference of sets that is written with a minus sign (`\mathbb{R} - \mathbb{Z}`) as one."""
    match node:
        case Apply("+", (whole, Apply("neg", (part,)))) if is_number_set(whole):
            return Apply("minus", (whole, part))
    return node


def _has_operator(node: Node) -> bool:
    return any(isinstance(below, Binder) for below in walk(node))


def _spoken(node: Node) -> str:
    """Words or the name of a symbol, as text to compare: `\\text{(B)}`, `B`."""
    match node:
        case Words(text):
            return text.strip("() .").casefold()
        case Symbol(name):
            return name.casefold()
        case Apply("*", args) if all(isinstance(arg, Symbol) for arg in args):
            return "".join(arg.name for arg in args if isinstance(arg, Symbol)).casefold()
    return f"\0{node}"


def _infinite(node: Node) -> int:
    match node:
        case Symbol("infinity"):
            return 1
        case Apply("neg", (Symbol("infinity"),)):
            return -1
    return 0


def _based(node: Node) -> int:
    return node.base if isinstance(node, Number) else 0


def _rows(node: Node, as_matrix: bool) -> Rows | None:
    match node:
        case Matrix(rows):
            return rows
        case Bracket("[" | "(", "]" | ")", items) if as_matrix and all(isinstance(item, Bracket) for item in items):
            return tuple(item.items for item in items if isinstance(item, Bracket))
        case Bracket("(", ")", items) | Bracket("<", ">", items):
            return tuple((item,) for item in items)
        # `[1, 2, 3]` is a vector; `[1, 2]` may be an interval.
        case Bracket("[", "]", items) if as_matrix or len(items) > 2:
            return tuple((item,) for item in items)
    return None


def _as_column(rows: Rows, other: Rows) -> Rows:
    """A row as a column where the other is a column: `(1 2)` is the vector (1, 2)."""
    if len(rows) == 1 and len(other) > 1 and len(other[0]) == 1:
        return tuple((entry,) for entry in rows[0])
    return rows
