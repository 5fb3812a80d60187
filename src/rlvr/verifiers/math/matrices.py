r"""Products whose order counts: formulas of vectors and matrices are compared by the values of 3 x 3 matrices.

The rule, decided here alone: a letter with an arrow is a vector, and capital letters are matrices where two of them
occur in a formula that transposes one, writes two or three of them in two orders (`AB - BA`), or, if it has no other
letters, raises one to the power -1 (`(AB)^{-1}`). Bold letters are vectors in a formula that joins two of them by a dot
or a cross or has an arrow, and bold capitals matrices where two of them stand side by side. Letters with a hat are
vectors beside a cross, but for p and q, which are estimates. Everywhere else letters are numbers: `nRT`,
`\frac{1}{2}AB \sin C`, `PQ + QR`.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rlvr.verifiers.math.evaluation import NumericEvaluator, is_constant
from rlvr.verifiers.math.expression import rebuild, rename, symbols, walk
from rlvr.verifiers.math.guarded_arithmetic import Fuel, UnknownValueError
from rlvr.verifiers.math.node_kinds import Apply, Binder, Bracket, Node, Number, Symbol

SIDE = 3
"""Rows of the matrices, and entries of the vectors, that letters stand for: a cross product needs three."""
SAMPLES = 2
"""Choices of all matrices at which formulas are compared; a false identity of random matrices fails at the first."""
# A power is a chain of products at 20 units of fuel each.
MAX_POWER = 6

_ARROWS = ("vec ", "overrightarrow ")
_MATRIX = "matrix "
_BOLD = "bold "
_HATS = "hat "
_ESTIMATES = frozenset({"hat p", "hat q"})
_UNIT_VECTORS = {"hat i": 0, "hat j": 1, "hat k": 2}
_NABLA = Symbol("nabla")
_SQUARED = Apply("^", (_NABLA, Number(Fraction(2))))
_PLACES = range(3)
_MINUS_ONE = Apply("neg", (Number(Fraction(1)),))
_TRANSPOSED = frozenset({Symbol("T"), Symbol("top")})


def is_vector(node: Node) -> bool:
    """Return True if a factor is a vector as written: a letter with an arrow, a cross product, a multiple or a sum of
    these."""
    match node:
        case Symbol(name):
            return name.startswith((*_ARROWS, _BOLD, _HATS)) or name == "nabla"
        case Apply("cross"):
            return True
        case Apply("neg", (arg,)) | Bracket(items=(arg,)):
            return is_vector(arg)
        case Apply("+", args):
            return all(map(is_vector, args))
        case Apply("*", args):
            return sum(map(is_vector, args)) == 1
    return False


def settled(node: Node) -> Node:
    """The tree of a text with bold letters, hats and products by dot or cross named as what they are: vectors,
    matrices, numbers."""
    parts = list(walk(node))
    names = {below.name for below in parts if isinstance(below, Symbol)}
    products = [below for below in parts if isinstance(below, Apply) and below.head in ("cross", "dot")]
    bold = {name for name in names if _BOLD in name}
    units = {f"{face}{letter}" for face in (_BOLD, "vec ") for letter in "ijk"} & names
    if not products and not bold and not units:
        return node
    multiplied = frozenset().union(*map(symbols, products))
    new = {name: name.replace(_BOLD, "") for name in bold}
    # `\mathbf{a} \times \mathbf{b}`: bold letters are vectors.
    if any(name.startswith(_ARROWS) for name in names) or bold & multiplied:
        new = {name: plain if plain.startswith(_ARROWS) else f"vec {plain}" for name, plain in new.items()}
    # `\mathbf{A}\mathbf{B}`: bold capitals are matrices.
    elif any(_side_by_side(below) for below in parts):
        new |= {name: _MATRIX + plain for name, plain in new.items() if _is_capital(plain)}
    # `3\mathbf{i} + 4\mathbf{j}`: unit vectors. One alone may be a letter.
    if len(units) > 1:
        new |= {name: _HATS + name[-1] for name in units}
    crossed = frozenset().union(*(symbols(product) for product in products if product.head == "cross"))
    hats = {name for name in crossed if name.startswith(_HATS)} - _ESTIMATES - set(_UNIT_VECTORS)
    return _named(node, new | {name: f"vec {name}" for name in hats})


def _named(node: Node, names: dict[str, str]) -> Node:
    """`node` with symbols renamed, and products of what are no vectors then as products of numbers."""
    if isinstance(node, Symbol):
        return Symbol(names.get(node.name, node.name))
    node = rebuild(node, lambda child: _named(child, names))
    match node:
        case Binder(variable=variable) if variable in names:
            return replace(node, variable=names[variable])
        case Apply("cross", (one, other)) if not (_has_vector(one) and _has_vector(other)):
            return Apply("*", (one, other))
        case Apply("dot", args):
            return Apply("*", args)
        case Apply("*", args) if any(isinstance(arg, Apply) and arg.head == "*" for arg in args):
            parts = (arg.args if isinstance(arg, Apply) and arg.head == "*" else (arg,) for arg in args)
            return Apply("*", tuple(itertools.chain.from_iterable(parts)))
    return node


def _has_vector(node: Node) -> bool:
    return any(
        isinstance(below, Symbol)
        and (below.name.startswith(_ARROWS) or below.name in _UNIT_VECTORS or below.name == "nabla")
        for below in walk(node)
    )


def _side_by_side(node: Node) -> bool:
    """Return True if two bold capital letters, or powers of them, are written as a product, without a sign."""
    if not (isinstance(node, Apply) and node.head == "*"):
        return False
    bases = [arg.args[0] if isinstance(arg, Apply) and arg.head == "^" else arg for arg in node.args]
    names = [base.name for base in bases if isinstance(base, Symbol)]
    return sum(name.startswith(_BOLD) and _is_capital(name.removeprefix(_BOLD)) for name in names) > 1


def alike(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Both trees with a letter that is a vector or a matrix on one side named so on the other, which writes it
    plainly."""
    wanted, theirs = ({below.name for below in walk(side) if isinstance(below, Symbol)} for side in (gold, answer))
    sides = []
    for side, own, others in ((gold, wanted, theirs), (answer, theirs, wanted)):
        new = {
            name.partition(" ")[2]: name
            for name in others - own
            if name.startswith(("vec ", _MATRIX)) and name.partition(" ")[2] in own - others
        }
        sides.append(rename(side, new) if new else side)
    return sides[0], sides[1]


def order_counts(gold: Node, answer: Node) -> bool:
    """Return True if the two are formulas of vectors or matrices."""
    return bool(_matrix_letters(gold, answer)) or any(
        (isinstance(below, Symbol) and (below.name.startswith((*_ARROWS, _MATRIX)) or below == _NABLA))
        or (isinstance(below, Apply) and below.head == "cross")
        for side in (gold, answer)
        for below in walk(side)
    )


def has_nabla(node: Node) -> bool:
    """Return True if the operator nabla occurs, which is no number."""
    return _NABLA in walk(node)


def equal(gold: Node, answer: Node, fuel: Fuel) -> bool | None:
    """Return True if two formulas have the same value for all vectors and matrices, None if the answer has no value;
    raises UnknownValueError if the gold has none."""
    letters = _matrix_letters(gold, answer)
    for sample in range(SAMPLES):
        evaluate = _Evaluator(sample, letters, fuel)
        one = evaluate.checked(gold)
        try:
            other = evaluate.checked(answer)
        except UnknownValueError:
            return None
        if not evaluate.same(one, other):
            return False
    return True


def _matrix_letters(gold: Node, answer: Node) -> frozenset[str]:
    """The capital letters that are matrices; none where they are numbers."""
    capitals = frozenset(name for side in (gold, answer) for name in symbols(side) if _is_capital(name)) - {"T"}
    if any(isinstance(below, Apply) and below.head == "transpose" for side in (gold, answer) for below in walk(side)):
        return capitals
    if any(_transposes_beside(below) for side in (gold, answer) for below in walk(side)):
        return capitals
    if len(capitals - {"I"}) < 2:
        return frozenset()
    others = {name for side in (gold, answer) for name in symbols(side)} - capitals
    for side in (gold, answer):
        for below in walk(side):
            match below:
                case Apply("^", (base, power)) if symbols(base) and symbols(base) <= capitals:
                    # `T` as an exponent is a transpose only of capitals; -1 only where no other letter could make the
                    # base a number.
                    if power in _TRANSPOSED or (power == _MINUS_ONE and not others):
                        return capitals
        products = [letters for letters in map(_ordered, walk(side)) if 2 <= len(letters) <= 3]
        # `AB - BA`: the same letters in two orders would be zero if they were numbers.
        if any(sorted(one) == sorted(other) and one != other for one in products for other in products):
            return capitals
    return frozenset()


def _transposes_beside(node: Node) -> bool:
    """Return True if a node is a product of a capital letter to the power T, and another one or the same (`A^T A`)."""
    if not (isinstance(node, Apply) and node.head == "*"):
        return False
    powers = [arg for arg in node.args if isinstance(arg, Apply) and arg.head == "^" and arg.args[1] in _TRANSPOSED]
    bases = [power.args[0] for power in powers]
    bases += [arg for arg in node.args if isinstance(arg, Symbol)]
    return bool(powers) and sum(isinstance(base, Symbol) and _is_capital(base.name) for base in bases) > 1


def _is_capital(name: str) -> bool:
    return name[0].isupper() and (len(name) == 1 or name[1] in "_'")


def _ordered(node: Node) -> list[str]:
    """The capital letters of a product, each once, in its order."""
    if not (isinstance(node, Apply) and node.head == "*"):
        return []
    letters = [arg.name for arg in node.args if isinstance(arg, Symbol) and _is_capital(arg.name)]
    if len(set(letters)) == len(letters):
        return letters
    return []


@dataclass(frozen=True)
class _Array:
    """Rows of numbers; a vector is one column."""

    rows: tuple[tuple[Any, ...], ...]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows[0])

    def entries(self) -> Iterator[Any]:
        return (entry for row in self.rows for entry in row)


class _Evaluator(NumericEvaluator):
    """Values of formulas in which some letters are arrays."""

    def __init__(self, sample: int, letters: frozenset[str], fuel: Fuel) -> None:
        super().__init__({}, fuel)
        self.sample = sample
        self.letters = letters
        self.place: tuple[int, ...] = ()
        """The places of the operators under which an expression stands."""

    def checked(self, node: Node) -> Any:
        """The value; raises UnknownValueError for whatever it cannot be."""
        try:
            return self(node)
        except (ArithmeticError, ValueError, TypeError, AttributeError) as error:  # an array where a number is needed
            raise UnknownValueError(str(error)) from None

    def same(self, one: Any, other: Any) -> bool:
        """Return True if two values are equal; a number is no array, but 0 is the array of zeros."""
        if isinstance(one, _Array) and isinstance(other, _Array):
            return one.shape == other.shape and all(map(self._near, one.entries(), other.entries()))
        if isinstance(one, _Array) or isinstance(other, _Array):
            array, number = (one, other) if isinstance(one, _Array) else (other, one)
            return number == 0 and all(self._near(entry, number) for entry in array.entries())
        return self._near(one, other)

    def _near(self, one: Any, other: Any) -> bool:
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one == other
        one = self.inexact(one)
        other = self.inexact(other)
        # Values have 50 digits, and these formulas are short: 1e-30 leaves 20 digits for rounding.
        return bool(abs(one - other) <= 1e-30 * (1 + abs(one)))

    def _symbol(self, name: str) -> Any:
        if name == _NABLA.name:
            raise UnknownValueError("nabla without an operand")
        seed = f"{name} {self.sample}"
        if self.place and not is_constant(name):
            seed += f" {self.place}"
        rng = random.Random(zlib.crc32(seed.encode()))
        if name in _UNIT_VECTORS:
            return _Array(tuple((Fraction(int(place == _UNIT_VECTORS[name])),) for place in range(SIDE)))
        if name.startswith(_ARROWS):
            return self._vector(seed)
        if name in self.letters or name.startswith(_MATRIX):
            if name.removeprefix(_MATRIX) == "I":
                return _IDENTITY
            # A diagonal that outweighs the rest of its row: no matrix is singular by chance, and every one has an
            # inverse.
            rows = [[rng.randint(-9, 9) + 30 * (row == column) for column in range(SIDE)] for row in range(SIDE)]
            return _Array(tuple(tuple(map(Fraction, row)) for row in rows))
        if symbols(Symbol(name)):
            # An odd number over 8: positive, never an integer, so that powers and roots of letters have real values.
            return Fraction(2 * rng.randint(1, 9) + 1, 8)
        return super()._symbol(name)

    def _apply(self, node: Apply) -> Any:
        if node.head in ("*", "cross") and (_NABLA in node.args or _SQUARED in node.args):
            return self._under_nabla(node)
        if node.head == "^" and node.args[1] in _TRANSPOSED and isinstance(base := self(node.args[0]), _Array):
            return _transposed(base)
        return super()._apply(node)

    def _under_nabla(self, node: Apply) -> Any:
        r"""$\nabla$ as a linear operator on what stands behind it: a sum over places of a vector times the operand
        there.

        Places have no order, so that $\nabla \times \nabla f$ is 0.
        """
        at = next(at for at, arg in enumerate(node.args) if arg in (_NABLA, _SQUARED))
        before = node.args[:at]
        operand = node.args[at + 1 :]
        if not operand:
            raise UnknownValueError("nabla without an operand")
        if len(operand) == 1:
            body = operand[0]
        else:
            body = Apply(node.head, operand)
        outer = self.place
        terms = []
        is_squared = node.args[at] == _SQUARED
        for places in itertools.product(_PLACES, repeat=2 if is_squared else 1):
            vectors = [self._vector(f"nabla {place} {self.sample}") for place in places]
            factor = self.times(*vectors)
            # Operators commute: sorted, so that the mixed second derivatives of f agree.
            self.place = tuple(sorted((*outer, *places)))
            terms.append(self.operate("*" if is_squared else node.head, [factor, self(body)]))
        self.place = outer
        if before:
            return self.operate(node.head, [*map(self, before), self.operate("+", terms)])
        return self.operate("+", terms)

    def _vector(self, seed: str) -> _Array:
        rng = random.Random(zlib.crc32(seed.encode()))
        return _Array(tuple((Fraction(rng.randint(-9, 9)),) for _ in range(SIDE)))

    def operate(self, head: str, args: list[Any]) -> Any:
        if not any(isinstance(arg, _Array) for arg in args):
            return super().operate(head, args)
        self.fuel.spend(20)
        operation = _OPERATIONS.get(head)
        if operation is None:
            raise UnknownValueError(f"{head} of a vector or a matrix")
        return operation(self, *args)

    def plus(self, *terms: Any) -> Any:
        arrays = [term for term in terms if term != 0]
        if len({term.shape for term in arrays}) != 1:
            raise UnknownValueError("a sum of different shapes")
        rows = zip(*(term.rows for term in arrays), strict=True)
        return _Array(tuple(tuple(self.add(*entries) for entries in zip(*row, strict=True)) for row in rows))

    def scaled(self, array: _Array, factor: Any) -> Any:
        return _Array(tuple(tuple(self.multiply(factor, entry) for entry in row) for row in array.rows))

    def times(self, *factors: Any) -> Any:
        return functools.reduce(self._product, factors)

    def _product(self, one: Any, other: Any) -> Any:
        if not isinstance(one, _Array):
            if isinstance(other, _Array):
                return self.scaled(other, one)
            return self.multiply(one, other)
        if not isinstance(other, _Array):
            return self.scaled(one, other)
        if one.shape == other.shape == (SIDE, 1):  # the scalar product
            one = _transposed(one)
        if one.shape[1] != other.shape[0]:
            raise UnknownValueError("a product of shapes that do not fit")
        columns = tuple(zip(*other.rows, strict=True))
        rows = tuple(tuple(self._dot(row, column) for column in columns) for row in one.rows)
        if len(rows) == len(rows[0]) == 1:
            return rows[0][0]
        return _Array(rows)

    def _dot(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> Any:
        return self.add(*(self.multiply(a, b) for a, b in zip(one, other, strict=True)))

    def over(self, array: Any, divisor: Any) -> Any:
        if isinstance(divisor, _Array):
            raise UnknownValueError("a division by a vector or a matrix")
        return self.scaled(array, self.divide(Fraction(1), divisor))

    def raised(self, array: Any, power: Any) -> Any:
        if not isinstance(power, Fraction) or power.denominator != 1 or not 0 < abs(power) <= MAX_POWER:
            raise UnknownValueError("a power of a matrix that is no small integer")
        return self.times(*[self.inverse(array) if power < 0 else array] * abs(int(power)))

    def inverse(self, array: _Array) -> Any:
        """By cofactors."""
        value = self.determinant(array)
        if value == 0:
            raise UnknownValueError("the inverse of a singular matrix")
        columns = tuple(zip(*array.rows, strict=True))
        # Rows of cross products of the columns: for A = (a b c) the inverse is (b x c, c x a, a x b)^T / det A.
        cofactors = _Array(tuple(_crossed(self, columns[place - 2], columns[place - 1]) for place in range(SIDE)))
        return self.scaled(cofactors, self.divide(Fraction(1), value))

    def determinant(self, array: _Array) -> Any:
        if array.shape != (SIDE, SIDE):
            raise UnknownValueError("the determinant of no square matrix")
        # The triple product a . (b x c) of the rows.
        return self._dot(array.rows[0], _crossed(self, array.rows[1], array.rows[2]))

    def size(self, array: _Array) -> Any:
        """The length of a vector, or the determinant that bars round a matrix mean."""
        if array.shape == (SIDE, 1):
            return self.root(self._product(array, array))
        return self.determinant(array)

    def crossed(self, one: Any, other: Any) -> Any:
        if not (isinstance(one, _Array) and isinstance(other, _Array) and one.shape == other.shape == (SIDE, 1)):
            raise UnknownValueError("a cross product of no vectors")
        entries = _crossed(self, tuple(one.entries()), tuple(other.entries()))
        return _Array(tuple((entry,) for entry in entries))


def _crossed(e: NumericEvaluator, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    pairs = ((place - 2, place - 1) for place in range(SIDE))
    return tuple(e.add(e.multiply(one[a], other[b]), -e.multiply(one[b], other[a])) for a, b in pairs)


def _transposed(array: _Array) -> _Array:
    return _Array(tuple(zip(*array.rows, strict=True)))


_IDENTITY = _Array(tuple(tuple(Fraction(int(row == column)) for column in range(SIDE)) for row in range(SIDE)))
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": _Evaluator.plus,
    "neg": lambda e, array: e.scaled(array, Fraction(-1)),
    "*": _Evaluator.times,
    "/": _Evaluator.over,
    "^": _Evaluator.raised,
    "cross": _Evaluator.crossed,
    "abs": _Evaluator.size,
    "det": _Evaluator.determinant,
    "transpose": lambda e, array: _transposed(array),
}
