r"""The comparison of two statements: sets, lists and labels first, then value by value.

Each rule here says when two ways of writing are one answer; whatever no rule allows is not equal. The gold decides the
form: where it is a plain number, arithmetic is no answer, and where it has no operator left to work out, none is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlvr.verifiers.math.declarations import disagree
from rlvr.verifiers.math.definitions import arguments_of, function_of, with_variables_of
from rlvr.verifiers.math.expression import FLIPPED, INEQUALITIES, children, difference, rename, replaced, symbols, walk
from rlvr.verifiers.math.math_values import Values, all_of, head_of
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Builder, Node, Number, Relation, Symbol, Words
from rlvr.verifiers.math.parameters import Parameters, Substitution
from rlvr.verifiers.math.plain_form import RefusedError, plain
from rlvr.verifiers.math.point_sampling import PointSampler
from rlvr.verifiers.math.rules import MathComparison
from rlvr.verifiers.math.statements import (
    Statement,
    StatementEntry,
    alphabetical,
    as_tuple,
    is_set,
    permuted,
    read_entry,
    read_statement,
    with_residues,
)

MAX_ITEMS = 64
"""Answers of a list; longer ones are not compared here."""
FUEL_PER_ITEM = 150
"""Fuel for each answer of a list: two values at two precisions, where the cheap first look has found the pair."""
_HATS = {f"hat {name}": name for name in "ijk"}
_ELLIPSIS = Symbol("...")
_SYMMETRIC = frozenset({("parallel",), ("perp",)})


class Judge(Values):
    """Compares two trees under `rules`; holds the sampler, and with it the fuel of one comparison."""

    def compare(self, gold: Node, answer: Node) -> MathComparison:
        if "pmod" in map(head_of, (*walk(gold), *walk(answer))):
            gold = with_residues(gold)
            answer = with_residues(answer)
        gold, answer = _without_hats(gold, answer), _without_hats(answer, gold)
        answer = with_variables_of(gold, answer)
        # `1, 2, 3, \ldots` is an infinite list and `1, 2, 3` is not.
        if (_ELLIPSIS in walk(gold)) != (_ELLIPSIS in walk(answer)):
            return MathComparison(False, "an ellipsis where the other has none")
        nested = _is_set_of_sets(gold) or _is_set_of_sets(answer)
        if not nested and (_is_set_like(gold) or _is_set_like(answer)):
            same = self._same_set(gold, answer)
            if same is not None:
                return MathComparison(same)
        try:
            wanted = read_statement(gold, self.sampler)
        except RefusedError as refused:
            return MathComparison(None, f"the gold answer: {refused}")
        try:
            stated = read_statement(answer, self.sampler)
        except RefusedError as refused:
            return MathComparison(False, str(refused))
        about = {
            name
            for entry in (*wanted.entries, *stated.entries)
            if isinstance(entry.value, Relation) and set(entry.value.operators) & INEQUALITIES
            for name in _subjects(entry.value)
        }
        if disagree(wanted.declared, stated.declared, about, (_letters(wanted), _letters(stated))):
            return MathComparison(False, "the letters are declared as something else")
        if not self._holds_where(wanted, stated):
            return MathComparison(False, "the answer has a condition that the gold has not")
        self.sampler.fuel.left += FUEL_PER_ITEM * min(len(wanted.entries), MAX_ITEMS)
        self.parameters = Parameters(wanted.declared, stated.declared, self.rules.variables)
        return MathComparison(self._statements(wanted, stated))

    def _holds_where(self, gold: Statement, answer: Statement) -> bool:
        """Return True if each value of the answer has no condition but those of a value of the gold that is the
        same."""
        return all(
            any(
                all(any(self.value(one, other) for one in wanted.conditions) for other in entry.conditions)
                and (len(gold.entries) == 1 or self.entries(wanted, entry))
                for wanted in gold.entries
            )
            for entry in answer.entries
            if entry.conditions
        )

    def _same_set(self, gold: Node, answer: Node) -> bool | None:
        try:
            sides = [_set_side(side, self.sampler) for side in (gold, answer)]
        except RefusedError:
            return None
        if _other_variable(gold, answer):
            return False
        labels = [label for label, _ in sides if label is not None]
        if len(labels) == 2 and labels[0] != labels[1] and symbols(labels[0]) != symbols(labels[1]):
            return None
        return self.sets.same(sides[0][1], sides[1][1])

    # statements

    def _statements(self, gold: Statement, answer: Statement) -> bool | None:
        if max(len(gold.entries), len(answer.entries)) > MAX_ITEMS:
            return None
        if not _labels(gold):
            answer = alphabetical(answer)
        if len(gold.entries) == 1 and len(answer.entries) == 1:
            wanted = _united(gold.entries[0])
            theirs = _united(answer.entries[0])
            if len(wanted) > 1 and len(theirs) > 1:
                return self.unordered(wanted, theirs)
            return self.entries(gold.entries[0], answer.entries[0])
        tuples = self._list_and_tuple(gold, answer)
        if tuples is not None:
            return tuples
        labelled = _labels(gold), _labels(answer)
        if any(len(labels) > 1 for labels in labelled):
            return self._together(gold, answer, lambda theirs: self._labelled(gold, theirs, *labelled))
        if self.rules.ordered and not gold.is_set:
            return self._in_order(gold.entries, answer.entries)
        if gold.is_set and not labelled[0]:
            return self._together(gold, answer, lambda theirs: self.unordered(gold.entries, theirs.entries))
        return self.unordered(gold.entries, answer.entries)

    def _together(self, gold: Statement, answer: Statement, compare: Callable[[Statement], bool | None]) -> bool | None:
        """Return the result of `compare`, with one substitution of the letters for all values of the answer."""
        wanted, theirs = ([entry.value for entry in side.entries] for side in (gold, answer))
        return self.as_one(
            wanted,
            theirs,
            lambda letters: compare(
                replace(answer, entries=tuple(_with_letters(entry, letters) for entry in answer.entries))
            ),
        )

    def _list_and_tuple(self, gold: Statement, answer: Statement) -> bool | None:
        """`1, 2` for (1, 2), in order; None where neither side is one tuple against a list."""
        for one, other in ((gold, answer), (answer, gold)):
            if len(one.entries) == 1 and len(other.entries) > 1 and not other.is_set and other.joined in ",and":
                value = one.entries[0].value
                if (
                    isinstance(value, Bracket)
                    and (value.opening, value.closing) == ("(", ")")
                    and len(value.items) == len(other.entries)
                    and not any(isinstance(entry.value, Bracket) for entry in other.entries)
                ):
                    listed = as_tuple(other.entries)
                    if one is gold:
                        return self.entries(one.entries[0], listed)
                    return self.entries(listed, one.entries[0])
        return None

    def _labelled(self, gold: Statement, answer: Statement, wanted: list[Node], theirs: list[Node]) -> bool | None:
        """Values by label, whatever the order of the labels; without labels on one side, in the order of the other."""
        if not theirs or not wanted:
            return self._in_order(*([entry.unlabelled for entry in side.entries] for side in (gold, answer)))
        if set(wanted) != set(theirs):
            return False
        results = []
        for label in wanted:
            one, other = (
                [entry.unlabelled for entry in side.entries if entry.label == label] for side in (gold, answer)
            )
            results.append(self.unordered(one, other))
        return all_of(results)

    def _in_order(self, gold: Sequence[StatementEntry], answer: Sequence[StatementEntry]) -> bool | None:
        if len(gold) != len(answer):
            return False
        return all_of(self.entries(one, other) for one, other in zip(gold, answer, strict=True))

    def unordered(self, gold: Sequence[StatementEntry], answer: Sequence[StatementEntry]) -> bool | None:
        """Every value of one is a value of the other; repetitions mean nothing."""
        unsure = False
        matched: set[int] = set()
        for start, one in enumerate(gold):
            has_partner = False
            for step in range(len(answer)):
                place = (start + step) % len(answer)
                other = answer[place]
                if self._apart(one, other):
                    continue
                # Quadratic in the items: the fuel bounds the pairs that are compared exactly.
                self.sampler.fuel.spend(30)
                same = self.entries(one, other)
                if same:
                    has_partner = True
                    matched.add(place)
                    if place == start and len(gold) == len(answer):
                        break
                elif same is None:
                    unsure = True
            if not has_partner:
                break
        else:
            if len(matched) == len(answer):
                return True
        return None if unsure else False

    def _apart(self, gold: StatementEntry, answer: StatementEntry) -> bool:
        """Return True if two plain values are clearly different numbers: a cheap first look at long lists."""
        if gold.rounded or answer.rounded:
            return False
        match gold.value, answer.value:
            case Bracket("(", ")", ours), Bracket("(", ")", theirs) if len(ours) == len(theirs):
                if gold.label is not None or answer.label is not None:  # a label says in which order the values are
                    return False
                return any(
                    self._apart(StatementEntry(one), StatementEntry(other))
                    for one, other in zip(ours, theirs, strict=True)
                )
            case Number() | Apply(), Number() | Apply():
                pass
            case _:
                return False
        if self.rules.tolerance or {head_of(gold.value), head_of(answer.value)} & {"percent", "degree", "pmod", ":"}:
            return False
        return self.sampler.differ(gold.value, answer.value)

    def entries(self, gold: StatementEntry, answer: StatementEntry) -> bool | None:
        return self.as_one(
            (gold.value,), (answer.value,), lambda letters: self._same_entries(gold, _with_letters(answer, letters))
        )

    def _same_entries(self, gold: StatementEntry, answer: StatementEntry) -> bool | None:
        if gold.label is not None and answer.label is not None and not _same_label(gold.label, answer.label):
            return self._solved_otherwise(gold, answer)
        if isinstance(gold.label, Bracket) and isinstance(answer.label, Bracket):
            answer = permuted(answer, gold.label.items)
        if isinstance(gold.value, Relation) or isinstance(answer.value, Relation):
            return self._relations(gold, answer)
        results = [self.same(gold.value, answer.value)]
        if gold.rounded is not None or answer.rounded is not None:
            for one in (gold.value, gold.rounded):
                for other in (answer.value, answer.rounded):
                    if one is not None and other is not None:
                        results.append(self.same(one, other))
        return True if True in results else results[0]

    # relations

    def _relations(self, gold: StatementEntry, answer: StatementEntry) -> bool | None:
        one = _as_relation(gold)
        other = _as_relation(answer)
        if one is None or other is None:
            return False
        # `2x + y = 3`: equations up to a constant factor.
        if one.operators == other.operators == ("=",):
            return self._equations(one, other)
        # `3 > x` is `x < 3`.
        if one.operators != other.operators:
            flipped = tuple(FLIPPED.get(operator, operator) for operator in reversed(other.operators))
            other = Relation(flipped, other.sides[::-1])
        if one.operators != other.operators:
            return False
        sides = all_of(self.value(a, b) for a, b in zip(one.sides, other.sides, strict=True))
        if not sides and one.operators in _SYMMETRIC:
            sides = all_of(self.value(a, b) for a, b in zip(one.sides, reversed(other.sides), strict=True))
        if sides or len(one.operators) > 1 or not set(one.operators) <= INEQUALITIES:
            return sides
        one_side = difference(one)
        other_side = difference(other)
        if symbols(one_side) != symbols(other_side) or not self.sampler.proportional(one_side, other_side):
            return False
        return self.sampler.same_sign(one_side, other_side)

    def _equations(self, gold: Relation, answer: Relation) -> bool | None:
        """Equal up to a constant factor, which rearranging does not change: `2x + y = 3`, `y = 3 - 2x`."""
        one = difference(gold)
        other = difference(answer)
        if symbols(one) != symbols(other) or not symbols(one):
            return False
        return self.sampler.proportional(one, other, sorted(_divisors(one) | _divisors(other)))

    def _solved_otherwise(self, gold: StatementEntry, answer: StatementEntry) -> bool | None:
        """Two labels: the same equation solved for another variable, or a function under another name (`y`, `f(x)`)."""
        assert gold.label is not None and answer.label is not None
        names = symbols(gold.label), symbols(answer.label)
        if isinstance(gold.label, Words) or isinstance(answer.label, Words):
            return self.entries(gold.unlabelled, answer.unlabelled)
        if Symbol("y") in (gold.label, answer.label) and (arguments_of(gold.label) or arguments_of(answer.label)):
            return self.same(gold.value, answer.value)
        if names[0] | symbols(gold.value) != names[1] | symbols(answer.value) or names[0] == names[1]:
            return False
        one = _as_relation(gold)
        other = _as_relation(answer)
        if one is None or other is None:
            return False
        return self._equations(one, other) or self._inverse(gold, answer)

    def _inverse(self, gold: StatementEntry, answer: StatementEntry) -> bool | None:
        """`A = \\pi r^2` and `r = \\sqrt{A / \\pi}`: each undoes the other, for positive values."""
        if not (isinstance(gold.label, Symbol) and isinstance(answer.label, Symbol)):
            return False
        there = self.sampler.equal(gold.label, replaced(gold.value, {answer.label.name: answer.value}), positive=True)
        back = self.sampler.equal(answer.label, replaced(answer.value, {gold.label.name: gold.value}), positive=True)
        return there and back


def _without_hats(node: Node, other: Node) -> Node:
    r"""`node` with `\mathbf{i}` for `\hat{i}`, where the other side has unit vectors without hats."""
    if any(isinstance(below, Symbol) and below.name in _HATS for below in walk(other)):
        return node
    return rename(node, _HATS)


def _is_set_like(node: Node) -> bool:
    """Return True if a node can only be a set of reals, or an inequality."""
    for below in walk(node):
        match below:
            case Relation(operators) if set(operators) & INEQUALITIES:
                return True
            case Symbol("Reals" | "Reals +" | "Reals -" | "Reals *" | "emptyset" | "infinity"):
                return True
            case Builder() | Apply("cup" | "cap" | "minus"):
                return True
            # A half-open interval, or an open one as `]1, 2[`; `(1, 2)` and `[1, 2]` may be a tuple and a list.
            case Bracket("[" | "]" | "(" as opening, closing, (_, _)) if opening + closing not in ("()", "[]"):
                return True
    return False


def _is_set_of_sets(node: Node) -> bool:
    r"""Return True if a node has a set with a set for a member, which is no set of reals (`\\{\\emptyset\\}`)."""
    return any(
        isinstance(below, Bracket) and below.opening == "{" and any(map(is_set, below.items)) for below in walk(node)
    )


def _other_variable(gold: Node, answer: Node) -> bool:
    """Return True if two inequalities are about different variables (`x > 2`, `y > 2`)."""
    for node in (gold, answer):
        parts = list(walk(node))
        if any(isinstance(below, Builder) for below in parts) or not any(
            isinstance(below, Relation) and set(below.operators) & INEQUALITIES for below in parts
        ):
            return False
    return bool(symbols(gold) and symbols(answer)) and not symbols(gold) & symbols(answer)


def _set_side(node: Node, sampler: PointSampler) -> tuple[Node | None, Node]:
    """The label (`x \\in`, `D =`) and the set."""
    node = plain(node)
    if isinstance(node, Relation) and set(node.operators) <= {"in", "="}:
        entry = read_entry(node, sampler)
        return entry.label, entry.value
    return None, node


def _labels(statement: Statement) -> list[Node]:
    """The labels of a statement, each once."""
    return list(dict.fromkeys(entry.label for entry in statement.entries if entry.label is not None))


def _letters(statement: Statement) -> frozenset[str]:
    """The letters of all values and labels."""
    nodes = (node for entry in statement.entries for node in (entry.value, entry.label) if node is not None)
    return frozenset().union(*map(symbols, nodes))


def _subjects(relation: Relation) -> frozenset[str]:
    r"""The letters that an inequality is about: one that stands alone (x in $2k\pi < x < 2k\pi + \pi$), else all."""
    alone = frozenset(side.name for side in relation.sides if isinstance(side, Symbol) and symbols(side))
    return alone or symbols(relation)


def _united(entry: StatementEntry) -> list[StatementEntry]:
    """The parts of a union, each of which may be a family of its own; else the entry."""
    if head_of(entry.value) != "cup":
        return [entry]
    return [replace(entry, value=part, rounded=None) for part in children(entry.value)]


def _with_letters(entry: StatementEntry, letters: Substitution) -> StatementEntry:
    """The entry with expressions for letters."""
    if not letters:
        return entry
    rounded = entry.rounded and replaced(entry.rounded, letters)
    return replace(entry, value=replaced(entry.value, letters), rounded=rounded)


def _same_label(one: Node, other: Node) -> bool:
    if isinstance(one, Bracket) and isinstance(other, Bracket):
        return _named(one) == _named(other)
    if one == other or isinstance(one, Bracket) or isinstance(other, Bracket):
        return True
    if (length := _segment(one)) and length == _segment(other):
        return True
    if arguments_of(one) and arguments_of(other):
        return function_of(one) == function_of(other)
    return isinstance(one, Symbol) and isinstance(other, Symbol) and one.name.casefold() == other.name.casefold()


def _segment(label: Node) -> list[str]:
    """The ends of the segment that a label names (`AB`), in one order."""
    match label:
        case Apply("*", (Symbol(one), Symbol(other))) if one.isupper() and other.isupper():
            return sorted((one, other))
    return []


def _named(label: Bracket) -> list[str]:
    """The labels of a tuple in one order and case."""
    return sorted(repr(item).casefold() for item in label.items)


def _as_relation(entry: StatementEntry) -> Relation | None:
    if isinstance(entry.value, Relation):
        return entry.value
    if entry.label is None:
        return None
    return Relation(("=",), (entry.label, entry.value))


def _divisors(node: Node) -> set[str]:
    """The symbols in denominators: clearing these multiplies an equation by more than a constant."""
    below = [part.args[1] for part in walk(node) if isinstance(part, Apply) and part.head == "/"]
    return set().union(*(symbols(part) for part in below))
