r"""Letters that stand for every integer or constant: one substitution of them must make the whole of an answer the
gold.

The rule, decided here alone: `a + bk` is the same family as `a' \pm bk'` where a and a' differ by a multiple of b, so
that an answer may be written with another letter, and with $\pm k + c$ for $k$. What belongs together (the entries of a
tuple, a matrix, an interval or a set, the sides of an inequality, the values of several labels) is one value for each
k, and has one substitution: $(k, k+1)$ is not $(k, k+2)$. Values of a list are families of their own.

Letters that the gold declares to be integers have these substitutions, and k, n, m, l, j in a product with pi (or 180
or 360 degrees), which count periods although nobody says so.

C and K, with a number or without, are arbitrary constants where they are a term of the gold, or a factor of one, beside
a variable, and the problem has no such letter. They may have other names ($A e^x + B e^{-x}$ for $C_1 e^x + C_2
e^{-x}$); one that is a term takes up what is constant: $-\cos^2 x + C$ is $\sin^2 x + C$.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlvr.verifiers.math.declarations import Declared
from rlvr.verifiers.math.expression import children, replaced, symbols, walk
from rlvr.verifiers.math.guarded_arithmetic import UnknownValueError
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Listing, Matrix, Node, Number, Quantity, Relation, Symbol
from rlvr.verifiers.math.point_sampling import PointSampler
from rlvr.verifiers.math.points import coordinates

MAX_LETTERS = 3
"""Letters of an answer that may be renamed."""
MAX_SHIFTS = 12
"""Substitutions that are tried for one way to rename the letters."""
MAX_PARTS = 8
"""Parts of an answer that shifts are read from."""

_LETTERS = frozenset("kKnNmMlLjtsrpqcCaAbBdD")
_CONSTANTS = frozenset("cCkK")
_PERIODS = frozenset("knmlj")
# Matches `C`, `C_1`; not `c`, `Cx`.
_ARBITRARY = re.compile(r"[CK](_\d+)?")
# Matches `A`, `k_2`; not `x`.
_OTHER_NAMES = re.compile(r"[ABCDKabcdk](_\d+)?")
_PLACES = (4, 6, 7, 8)
"""Sample points, of positive variables, at which a constant is read off."""
_COMPOSED = frozenset({"cup", "cap", "minus", ":", "cases", "pmod"})

Substitution = Mapping[str, Node]


@dataclass(frozen=True)
class Parameters:
    """The letters that the gold and the answer declare."""

    gold: Declared = frozenset()
    answer: Declared = frozenset()
    problem: frozenset[str] = frozenset()
    """Letters that the problem uses."""

    def substitutions(
        self, gold: Sequence[Node], answer: Sequence[Node], sampler: PointSampler
    ) -> Iterator[Substitution]:
        """Yield values that the letters of an answer may stand for, where its values and the gold's are not the same as
        written."""
        wanted = [part for value in gold for part in _parts(value)][:MAX_PARTS]
        theirs = [part for value in answer for part in _parts(value)][:MAX_PARTS]
        for names in self._renamings(wanted, theirs):
            if names:
                yield names
            renamed = [replaced(part, names) for part in theirs]
            for shift in self._shifts(wanted, renamed, sampler):
                yield {**shift, **{name: replaced(value, shift) for name, value in names.items()}}
            for constant in self._absorbed(wanted, renamed, sampler):
                yield {**constant, **{name: replaced(value, constant) for name, value in names.items()}}

    def _renamings(self, gold: Sequence[Node], answer: Sequence[Node]) -> Iterator[Substitution]:
        """The letters that only the gold has for those that only the answer has, in every order; arbitrary constants of
        both may change places."""
        names = [frozenset().union(*map(symbols, side)) for side in (gold, answer)]
        ours = sorted(names[0] - names[1])
        theirs = sorted(names[1] - names[0])
        if len(ours) != len(theirs) or len(ours) > MAX_LETTERS:
            return
        both = sorted(name for name in names[0] & names[1] if self._is_arbitrary(name, gold))
        if len(ours) + len(both) > MAX_LETTERS:
            both = []
        for order in itertools.permutations(ours + both):
            pairs = [(one, other) for one, other in zip(order, theirs + both, strict=True) if one != other]
            if all(self._may_be_renamed(one, other, gold, answer) for one, other in pairs):
                yield {other: Symbol(one) for one, other in pairs}

    def _may_be_renamed(self, one: str, other: str, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        """Return True if `one` is an arbitrary integer (next to pi, or declared) or a constant of integration, and
        `other` may be."""
        if other not in {name for name, _ in self.answer} and other[0] not in _LETTERS:
            return False
        return (
            one in {name for name, _ in self.gold}
            or (one[0] in _CONSTANTS and other[0] in _CONSTANTS)
            or (_counts_periods(one, gold) and _counts_periods(other, answer))
            or (
                self._is_arbitrary(one, gold)
                and _OTHER_NAMES.fullmatch(other) is not None
                and other[0] not in self.problem
                and all(_ARBITRARY.fullmatch(name) or not name[0].isupper() for part in gold for name in symbols(part))
            )
        )

    def _is_arbitrary(self, name: str, gold: Sequence[Node]) -> bool:
        """Return True if a letter is an arbitrary constant: a term, or a factor of one, beside a variable."""
        if not _ARBITRARY.fullmatch(name) or name[0] in self.problem:
            return False
        variables = {other for part in gold for other in symbols(part) if not other[0].isupper()}
        return bool(variables) and any(
            Symbol(name) in _factors(term) for part in gold for term in _terms(part) if name in symbols(term)
        )

    def _absorbed(self, gold: Sequence[Node], answer: Sequence[Node], sampler: PointSampler) -> Iterator[Substitution]:
        """For a constant C that is a term of the gold: the C of the answer with which both agree at one point."""
        if len(gold) != 1 or len(answer) != 1 or symbols(gold[0]) != symbols(answer[0]):
            return
        declared = {name for name, domain in self.gold if domain != "Reals"}
        for term in _terms(gold[0]):
            if isinstance(term, Symbol) and term.name not in declared and self._is_arbitrary(term.name, gold):
                constant = _agreeing(gold[0], answer[0], term.name, sampler)
                if constant is not None:
                    yield {term.name: constant}

    def _shifts(self, gold: Sequence[Node], answer: Sequence[Node], sampler: PointSampler) -> Iterator[Substitution]:
        r"""`\pm k + c` for the integers k of an answer that has the gold's letters."""
        letters = sorted(frozenset().union(*map(symbols, gold)))
        choices = []
        for name in letters:
            if (name, "Integers") in self.gold or (_counts_periods(name, gold) and _counts_periods(name, answer)):
                choices.append([(name, *shift) for shift in _fits(name, gold, answer, sampler)] or [(name, 1, 0)])
        for chosen in itertools.islice(itertools.product(*choices), MAX_SHIFTS):
            moved = [(name, sign, shift) for name, sign, shift in chosen if (sign, shift) != (1, 0)]
            if moved:
                yield {name: _line(name, sign, shift) for name, sign, shift in moved}


def _parts(node: Node) -> Iterator[Node]:
    """The expressions that a value consists of."""
    if isinstance(node, (Bracket, Matrix, Relation, Listing, Quantity)) or (
        isinstance(node, Apply) and node.head in _COMPOSED
    ):
        for child in children(node):
            yield from _parts(child)
    else:
        yield node


def _terms(node: Node) -> tuple[Node, ...]:
    match node:
        case Apply("+", args):
            return tuple(term for arg in args for term in _terms(arg))
        case Apply("neg", (arg,)) | Bracket("(" | "[", ")" | "]", (arg,)):
            return _terms(arg)
    return (node,)


def _factors(node: Node) -> tuple[Node, ...]:
    match node:
        case Apply("*", args):
            return tuple(factor for arg in args for factor in _factors(arg))
        case Apply("/", (arg, _)) | Apply("neg", (arg,)) | Bracket("(" | "[", ")" | "]", (arg,)):
            return _factors(arg)
    return (node,)


def _agreeing(gold: Node, answer: Node, name: str, sampler: PointSampler) -> Node | None:
    """`C + d` with which an answer `h + C` is the gold `g + C` at one point; None for another multiple of C."""
    variables = sorted(symbols(gold) - {name})
    for place in _PLACES:
        point = {other: Number(coordinates(other)[place]) for other in variables}
        at_zero, at_one = ({**point, name: Number(Fraction(value))} for value in (0, 1))
        wanted = replaced(gold, at_zero)
        at_start = replaced(answer, at_zero)
        slope = replaced(answer, at_one)
        difference = Apply("+", (wanted, Apply("neg", (at_start,))))
        step = Apply("+", (slope, Apply("neg", (at_start,))))
        try:
            values = [complex(sampler.value(node)) for node in (difference, step)]
        except (UnknownValueError, OverflowError):
            continue
        if values[0].imag == 0 and abs(values[1] - 1) < 1e-12:
            return Apply("+", (Symbol(name), difference))
    return None


def _line(name: str, sign: int, shift: int) -> Node:
    letter = Symbol(name)
    return Apply("+", (letter if sign > 0 else Apply("neg", (letter,)), Number(Fraction(shift))))


def _fits(name: str, gold: Sequence[Node], answer: Sequence[Node], sampler: PointSampler) -> list[tuple[int, int]]:
    """(sign, c) of every `sign k + c` with which some part of the answer is some part of the gold."""
    fits: dict[tuple[int, int], None] = {}
    ours, theirs = ([line for part in side if (line := _as_line(part, name, sampler))] for side in (gold, answer))
    for start, step in ours:
        for other_start, other_step in theirs:
            if abs(abs(step) - abs(other_step)) > 1e-12 * abs(step):
                continue
            sign = step / other_step
            turns = (start - other_start) / other_step
            # Quotients of doubles that are +-1 and an integer up to rounding.
            if abs(sign - round(sign.real)) < 1e-10 and abs(turns - round(turns.real)) < 1e-10:
                fits[round(sign.real), round(turns.real)] = None
    return list(fits)


def _as_line(part: Node, name: str, sampler: PointSampler) -> tuple[complex, complex] | None:
    """The value at 0 and the step of an expression that is linear in its one letter, else None."""
    if symbols(part) != {name}:
        return None
    try:
        zero, one, two = (complex(sampler.at(part, {name: Fraction(k)})) for k in range(3))
    except (UnknownValueError, OverflowError):
        return None
    # The second difference of a line is 0; 1e-12 is for the doubles that the values become.
    if abs(two - 2 * one + zero) > 1e-12 * (1 + abs(two)) or one == zero:
        return None
    return zero, one - zero


def _counts_periods(name: str, parts: Sequence[Node]) -> bool:
    """Return True if a letter counts periods in one of the expressions."""
    return name in _PERIODS and any(_multiplies_pi(part, name) for part in parts)


def _multiplies_pi(node: Node, name: str) -> bool:
    r"""Return True if the symbol stands in a product with pi (or 180 or 360 degrees)."""
    for below in walk(node):
        if isinstance(below, Apply) and below.head in ("*", "/") and name in symbols(below):
            parts = list(walk(below))
            if Symbol("pi") in parts or any(isinstance(part, Apply) and part.head == "degree" for part in parts):
                return True
    return False
