r"""Restatements: answers that are right only because they are the problem over again.

The rule, decided here alone, of answers that are equal to the gold: an answer is no answer where it, or a value that it
states (behind its labels, declarations, units, set brackets), is what the prompt says, in another form than the gold's.
What the prompt says is its text, and each of its formulas with terms in any order, moved from side to side, multiplied
by a number (`2x > 6` for `6 < 2x`), or with a constant, a square or a factor taken apart (`x \cdot x + 1 + 1`). An
answer in the gold's form is never a restatement. A gold with one unknown that is solved (`x = 3`, `x > 3`) asks for a
solved answer, whatever the prompt says.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from rlvr.verifiers.math.expression import COMPARED, FLIPPED, children, difference, is_literal, rebuild, symbols
from rlvr.verifiers.math.guarded_arithmetic import UnknownValueError
from rlvr.verifiers.math.latex import clean, spelling
from rlvr.verifiers.math.letters import MAX_FORMULAS, PROMPT_LENGTH, formulas, read, read_formula
from rlvr.verifiers.math.math_tokens import UnreadableError
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Builder, Listing, Node, Number, Quantity, Relation, Symbol
from rlvr.verifiers.math.numeric import read_number
from rlvr.verifiers.math.plain_form import RefusedError
from rlvr.verifiers.math.point_sampling import PointSampler
from rlvr.verifiers.math.statements import is_label, read_statement

_ZERO = Number(Fraction(0))
_ONE = Number(Fraction(1))
_HALF = Apply("/", (_ONE, Number(Fraction(2))))
# Matches `Solve `, `, `, `. `; not `x + 1`.
_BETWEEN_FORMULAS = re.compile(r"(?<!\\)\b[A-Za-z]{2,}|[,;:?\n]|\.(?:\s|\Z)")
"""Words and punctuation, in a prompt without math delimiters."""
_OPERATOR = re.compile(r"[-+*/^=<>]")


def restates(prompt: str, gold: str, answer: str) -> bool:
    """Return True if the cleaned `answer`, which is equal to the cleaned `gold`, is only what the prompt says."""
    if read_number(answer):
        return False
    try:
        wanted = read(gold)
        stated = read(answer)
    except (UnreadableError, RecursionError):
        return _is_quoted(prompt, gold, answer)
    if _canonical(wanted) == _canonical(stated):
        return False
    prompt_formulas = _formulas_of(prompt)
    if _states_what_is_said(wanted, stated, prompt_formulas):
        return True
    # Solved for the same symbol, where the gold is.
    subject = _solved_for(wanted)
    if subject is not None and _solved_for(stated) == subject:
        return False
    # `2x = 6` where the gold is `x = 3`: a relation in one unknown is not solved where the gold's are.
    if any(map(_is_unsolved, _parts(stated))) and not any(map(_is_unsolved, _parts(wanted))):
        return True
    return _is_quoted(prompt, gold, answer) or any(_rearranged(stated, one) for one in prompt_formulas)


def _states_what_is_said(gold: Node, answer: Node, prompt_formulas: tuple[Node, ...]) -> bool:
    """Return True if a value that the answer states is a formula of the prompt, and not in the gold's form.

    Labels, declarations, units and set brackets are round a value, not part of it. A value and its rounding is one
    value.
    """
    if not prompt_formulas:
        return False
    forms = {form for value in _stated(gold) for form in value}
    return any(
        not forms.intersection(value)
        and any(
            _rearranged(form, one)
            for form in value
            # A number, a letter or a solved relation of the prompt may well be the answer: nothing is to be worked out.
            if children(form) and not is_literal(form) and _solved_for(form) is None
            for one in prompt_formulas
        )
        for value in _stated(answer)
    )


def _stated(node: Node) -> list[tuple[Node, ...]]:
    """The canonical forms of each value that a tree states: of the value, and of its rounding."""
    try:
        entries = read_statement(node, PointSampler()).entries
    except (RefusedError, UnknownValueError):
        return []
    return [
        tuple(_canonical(_bare(form)) for form in (entry.value, entry.rounded) if form is not None) for entry in entries
    ]


def _bare(value: Node) -> Node:
    """A value without its unit, percent or degree sign."""
    match value:
        case Quantity(inner) | Apply("percent" | "degree", (inner,)):
            return _bare(inner)
    return value


def _is_quoted(prompt: str, gold: str, answer: str) -> bool:
    """Return True if the prompt has the answer letter by letter, and not the gold."""
    quoted = spelling(answer)
    prompt_text = _spelled(prompt)
    # Fewer characters occur in nearly every prompt by chance.
    if len(quoted) < 3 or quoted not in prompt_text or spelling(gold) in prompt_text:
        return False
    at = prompt_text.find(quoted)
    cuts_word = (quoted[0].isalnum() and prompt_text[at - 1 : at].isalnum()) or (
        quoted[-1].isalnum() and prompt_text[at + len(quoted) :][:1].isalnum()
    )
    return not cuts_word


@functools.lru_cache(maxsize=256)
def _spelled(prompt: str) -> str:
    return spelling(clean(prompt[-PROMPT_LENGTH:]))


@functools.lru_cache(maxsize=256)
def _formulas_of(prompt: str) -> tuple[Node, ...]:
    """The formulas of a prompt that are more than a number or a letter, as trees."""
    texts = formulas(prompt) or [
        text for text in _BETWEEN_FORMULAS.split(prompt[-PROMPT_LENGTH:]) if _OPERATOR.search(text)
    ]
    trees = []
    for text in texts[-MAX_FORMULAS:]:
        node = read_formula(clean(text))
        if node is None:
            continue
        parts = node.items if isinstance(node, Listing) else (node,)
        trees += [part for part in parts if children(part)]
    return tuple(trees)


def _parts(node: Node) -> tuple[Node, ...]:
    """The items of a list, and the conditions that define a set (`\\{x : 2x > 6\\}`)."""
    match node:
        case Listing(items=items):
            return items
        case Bracket("{", "}", (Builder(conditions=conditions),)):
            return conditions
    return (node,)


def _is_unsolved(node: Node) -> bool:
    """Return True if a node is a relation in one unknown that does not stand alone (`2x < 6`, `-6 < 2x < 6`,
    `|x| < 3`)."""
    if not isinstance(node, Relation) or not set(node.operators) <= COMPARED or len(symbols(node)) != 1:
        return False
    if "=" in node.operators and is_label(node.sides[0]):  # `\tan\theta = 3` names what was asked for
        return False
    if len(node.sides) == 3:
        return not isinstance(node.sides[1], Symbol)
    return len(node.sides) == 2 and _solved_for(node) is None


def _solved_for(node: Node) -> Symbol | None:
    """The symbol that stands alone on one side of a relation, if the other side is free of it."""
    if not isinstance(node, Relation) or len(node.sides) != 2 or not set(node.operators) <= COMPARED:
        return None
    left, right = node.sides
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Symbol) and symbols(one) and not symbols(one) & symbols(other):
            return one
    return None


def _rearranged(answer: Node, formula: Node) -> bool:
    """Return True if the answer is a formula of the prompt, its terms in another order or on other sides."""
    if not (isinstance(answer, Relation) and isinstance(formula, Relation)):
        return _canonical(answer) == _canonical(formula)
    if (
        len(answer.operators) > 1
        or len(formula.operators) > 1
        or not set(answer.operators + formula.operators) <= COMPARED
    ):
        return _canonical(answer) == _canonical(formula)
    (operator,) = answer.operators
    (other,) = formula.operators
    if other not in (operator, FLIPPED[operator]) or symbols(answer) != symbols(formula):
        return False
    return PointSampler().proportional(difference(answer), difference(formula)) is True


def _canonical(node: Node) -> Node:
    """The tree with one order of terms and factors, and one direction of inequalities; brackets round a group are
    gone."""
    match node:
        case Bracket("(", ")", (inner,)):
            return _canonical(inner)
        case Apply("neg", (inner,)):
            inside = _canonical(inner)
            if isinstance(inside, Number) and not inside.base:
                return Number(-inside.value)
            if isinstance(inside, Apply) and inside.head == "+":
                return Apply("+", _sorted(tuple(_canonical(Apply("neg", (term,))) for term in inside.args)))
            return _product((Number(Fraction(-1)), inside))
        case Apply("*", args):
            return _product(tuple(_canonical(arg) for arg in args))
        case Apply("+", args):
            terms = _flattened("+", tuple(_canonical(arg) for arg in args))
            left = _sorted(_with_one_constant(terms)) or (_ZERO,)
            return left[0] if len(left) == 1 else Apply("+", left)
        # `x^1`, `x/1`.
        case Apply("^" | "/", (inner, over)) if _canonical(over) == _ONE:
            return _canonical(inner)
        # `\sqrt{x}` and `x^{1/2}` are one form.
        case Apply("root", (inner,)) | Apply("root", (inner, Number(Fraction(numerator=2, denominator=1)))):
            return Apply("^", (_canonical(inner), _HALF))
        case Apply("/", (Apply("+") | Bracket("(", ")", (Apply("+"),)) as top, Number(whole, 0))) if whole > 0:
            above = _canonical(top)
            parts = [_divided(term, whole) for term in (above.args if isinstance(above, Apply) else (above,))]
            if None in parts:
                return Apply("/", (above, Number(whole)))
            return _canonical(Apply("+", tuple(part for part in parts if part is not None)))
        case Apply():
            return rebuild(node, _canonical)
        case Relation((operator,), (left, right)):
            sides = (_canonical(left), _canonical(right))
            if operator in (">", ">="):
                return Relation((FLIPPED[operator],), sides[::-1])
            return Relation((operator,), _sorted(sides) if operator in ("=", "!=") else sides)
        case Bracket() | Listing():
            return rebuild(node, _canonical)
    return node


def _with_one_constant(terms: tuple[Node, ...]) -> tuple[Node, ...]:
    """Terms with their numbers added up, and no zero: `x + 1 + 1` is `x + 2`."""
    numbers = [term for term in terms if isinstance(term, Number) and not term.base]
    total = Number(sum((number.value for number in numbers), Fraction(0)))
    others = tuple(term for term in terms if term not in numbers)
    return others if total == _ZERO else (*others, total)


def _divided(term: Node, divisor: Fraction) -> Node | None:
    """A canonical term over a number, or None where its coefficient is no multiple of that."""
    factors = _flattened("*", (term,))
    for at, factor in enumerate(factors):
        if isinstance(factor, Number) and not factor.base and factor.value % divisor == 0:
            return _product((*factors[:at], Number(factor.value / divisor), *factors[at + 1 :]))
    return None


def _product(factors: tuple[Node, ...]) -> Node:
    """Factors in one order, with one sign in front; numbers are not multiplied (`4 \\cdot 3` is work done on 12)."""
    sign = 1
    parts = []
    for factor in _flattened("*", factors):
        if isinstance(factor, Number) and factor.value < 0:
            sign = -sign
            factor = Number(-factor.value, factor.base)
        if factor != _ONE:
            parts.append(factor)
    for letter in {part for part in parts if isinstance(part, Symbol)}:  # `x \cdot x` is x^2
        if (count := parts.count(letter)) > 1:
            parts = [part for part in parts if part != letter] + [Apply("^", (letter, Number(Fraction(count))))]
    if sign < 0:
        parts.append(Number(Fraction(-1)))
    ordered = _sorted(tuple(parts)) or (_ONE,)
    if len(ordered) == 1:
        return ordered[0]
    return Apply("*", ordered)


def _flattened(head: str, parts: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(
        inner for part in parts for inner in (part.args if isinstance(part, Apply) and part.head == head else (part,))
    )


def _sorted(parts: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(sorted(parts, key=repr))
