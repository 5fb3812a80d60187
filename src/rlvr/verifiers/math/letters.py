r"""Reading a text as a tree, and the one question that a text alone leaves open: are letters behind a number a unit?

The rule, decided here alone: the symbol of a unit behind a number (`5 m`, `5m`, `3 kg`), with or without a space, is a
unit where it is all that stands behind the number of a whole value, nothing nearby is a variable, and its letters are
no variables of the gold or the problem. In `49 a^2 - 49 b^2` letters are variables, as everywhere in arithmetic. Words
set upright (`5 \text{ m}`) are no letters. What a unit does to a value is decided in units.py.
"""

from __future__ import annotations

import functools
import re

from rlvr.verifiers import math_in_text
from rlvr.verifiers.math.expression import symbols, walk
from rlvr.verifiers.math.latex import balanced, clean
from rlvr.verifiers.math.math_tokens import LONGEST_SYMBOL, UnreadableError
from rlvr.verifiers.math.node_kinds import Apply, Bracket, Listing, Node, Quantity, Relation
from rlvr.verifiers.math.parser import parse
from rlvr.verifiers.math.statements import is_label
from rlvr.verifiers.math.units import dimension, singular

# Matches `5 m`, `2x`; not `x2`. Without a letter behind a digit there is one reading only.
_MAY_BE_UNIT = re.compile(r"\d\s*[A-Za-z]")
# Matches `f(s) = 2s`, `g(x, y) =`; not `f(2) = 3`.
_DEFINED = re.compile(r"[A-Za-z]\(\s*([A-Za-z](?:\s*,\s*[A-Za-z])*)\s*\)\s*=")
"""The variables of a definition, `f(s) = 2s`."""
# Matches `x + 1`; not `cm`, `\x`.
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
# Matches `the side s is`; not `a side`, `(b)`, `5 m`, `in m/s`, `x's`.
_LONE_LETTER = re.compile(
    r"(?<![^\W_])(?<!\d )(?<![\\/('\u2019])(?<!\bin )(?<!\bper )(?![AaI])[A-Za-z](?![A-Za-z0-9'\u2019])"
)
"""A letter that stands alone in prose: a variable (`the side s`), unless it is a word, a mark (`(b)`) or a unit (`5 m`,
`in m/s`)."""
# Matches `\sqrt{m}`, `\pi`; not `m`.
_STYLED = re.compile(r"\\[A-Za-z]+\s*(?:\{([^{}\\]*)\})?")
_WORD = re.compile("[A-Za-z]{2}")
_VOWEL = re.compile("[aeiouyAEIOUY]")
_UNKNOWNS = frozenset("uvwxyz")
_SPELLS = frozenset(
    """abbreviation acronym alphabetical alphabetically arrange arranged arrangement cipher code color colour initial
    letter order ordering password permutation rank ranked ranking sequence sort sorted spell spelled spelling string
    word""".split()  # noqa: SIM905
)
"""Words of a problem whose answer may be letters in their order."""
MAX_FACTORS = 5
"""Letters of a product that is written as one word."""
# Matches `How many apples are left?`; not `many apples`.
_HOW_MANY = re.compile(r"\bhow (?:many|much)\s([^.?!\n]{1,120})", re.IGNORECASE)
# Matches `84 \text{ times}`, `84 times`; not `84`, `times`.
_COUNTED = re.compile(
    r"([^A-Za-z]*\d)\s*(?:\\(?:text|textbf|textrm|mathrm)\s*\{\s*([A-Za-z' ]+?)\s*\}|\s([A-Za-z' ]+))", re.ASCII
)
"""A number and the words behind it."""
_NO_NOUNS = frozenset("not no or and is are was were do does did if but maybe wrong half".split())  # noqa: SIM905
PROMPT_LENGTH = 20_000
"""Characters at the end of a prompt in which formulas are looked for."""
MAX_FORMULAS = 24
"""Formulas of a prompt that are read as trees, the last ones."""
MAX_FORMULA = 300
"""Characters of such a formula."""


@functools.lru_cache(maxsize=1024)
def read(text: str, variables: frozenset[str] = frozenset()) -> Node:
    """The tree of a cleaned answer; `variables` are letters that are no units. Raises Unreadable."""
    if not _MAY_BE_UNIT.search(text):
        return parse(text)
    variables = variables.union(*(re.findall("[A-Za-z]", names) for names in _DEFINED.findall(text)))
    try:
        with_units = parse(text, variables=variables)
    except UnreadableError:
        return parse(text, bare_units=False)
    if not any(map(_is_algebra, _values(with_units))):
        return with_units
    try:
        return parse(text, bare_units=False)
    except UnreadableError:
        return with_units


def read_formula(text: str) -> Node | None:
    """The tree of a cleaned formula of a prompt; None where it is too long or cannot be read."""
    if len(text) > MAX_FORMULA or not balanced(text):
        return None
    try:
        return read(text)
    except (UnreadableError, RecursionError):
        return None


def _values(node: Node) -> list[Node]:
    """Return the values that stand on their own in an answer: the items of lists, the sides of relations that are no
    labels."""
    match node:
        case Listing() | Bracket():
            return [value for item in node.items for value in _values(item)]
        case Relation():
            sides = [side for side in node.sides if not is_label(side)]
            if len(sides) == len(node.sides) and not _is_worked_out(sides):
                return [node]
            return [value for side in sides for value in _values(side)]
    return [node]


def _is_worked_out(sides: list[Node]) -> bool:
    """Return True if a chain without a label ends in a quantity (`5 m = 500 cm`); `2F = 9C` and `3m = 12` are
    equations."""
    units = [dimension(side.unit) for side in sides if isinstance(side, Quantity)]
    return isinstance(sides[-1], Quantity) and None not in units and len({unit[0] for unit in units if unit}) == 1


def _is_algebra(value: Node) -> bool:
    """Return True if a value has variables, or arithmetic between its quantities."""
    match value:
        case Quantity(inner) | Apply("neg", (inner,)):
            return _is_algebra(inner)
    return bool(symbols(value)) or any(isinstance(below, Quantity) for below in walk(value))


def units_of(node: Node) -> frozenset[str]:
    """The letters of the units of a tree that could be read as variables too."""
    words = [
        word for below in walk(node) if isinstance(below, Quantity) for word in re.findall("[A-Za-z]+", below.unit)
    ]
    return frozenset(letter for word in words if len(word) <= LONGEST_SYMBOL for letter in word)


def is_product(unit: str, prompt: str) -> bool:
    """Return True if letters behind a number may be a product of the problem's variables."""
    return unit.isalpha() and len(unit) <= LONGEST_SYMBOL and variables_of(prompt).issuperset(unit)


def is_product_of_letters(text: str, variables: frozenset[str], nouns: frozenset[str] = frozenset()) -> bool:
    """Return True if letters without a space are a product, whose factors have no order: `mgh`, `nRT`, `xyz`; `cab` of
    variables of the problem.

    Letters that nobody can pronounce are one, and unknowns (u to z), unless all are capitals (names and orders are
    written so) or the problem, whose words are `nouns`, asks for an order or a word; nobody writes a factor twice.
    """
    if (
        not text.isascii()
        or not text.isalpha()
        or len(text) > MAX_FACTORS
        or len(set(text)) != len(text)
        or text.isupper()
        or not _SPELLS.isdisjoint(nouns)
    ):
        return False
    return _VOWEL.search(text) is None or _UNKNOWNS.issuperset(text) or variables.issuperset(text)


@functools.lru_cache(maxsize=256)
def formulas(prompt: str) -> tuple[str, ...]:
    """The texts between math delimiters in a prompt, in order."""
    text = prompt[-PROMPT_LENGTH:]
    return tuple(text[start:stop] for start, stop, _ in math_in_text.formulas(text))


@functools.lru_cache(maxsize=256)
def variables_of(prompt: str) -> frozenset[str]:
    """The letters that a prompt uses as variables, in its formulas or alone in its prose."""
    variables: set[str] = set()
    texts = formulas(prompt)
    for place, formula in enumerate(texts):
        variables |= _letters_of(formula, is_read=len(texts) - place <= MAX_FORMULAS)
    return frozenset(variables.union(_LONE_LETTER.findall(_prose(prompt))))


@functools.lru_cache(maxsize=256)
def words_of(prompt: str) -> frozenset[str]:
    """The words of a prompt of three letters and more, in lower case and singular."""
    return frozenset(singular(word) for word in re.findall("[a-z]{3,}", prompt[-PROMPT_LENGTH:].lower()))


def without_asked_noun(answer: str, prompt: str) -> str:
    r"""An answer without the words behind its number, where these are what the prompt asks "How many" of
    (`84 \text{ times}`)."""
    counted = _COUNTED.fullmatch(answer)
    if counted is None:
        return answer
    words = _words(counted[2] or counted[3])
    is_asked_for = any(phrase[: len(words)] == words for phrase in _counted_phrases(prompt))
    if words and is_asked_for and not _NO_NOUNS.intersection(words):
        return counted[1]
    return answer


@functools.lru_cache(maxsize=256)
def _counted_phrases(prompt: str) -> tuple[list[str], ...]:
    """The words behind each "How many" of a prompt."""
    return tuple(_words(phrase) for phrase in _HOW_MANY.findall(prompt[-PROMPT_LENGTH:]))


def _words(text: str) -> list[str]:
    return [singular(word) for word in re.findall("[a-z']+", text.casefold())]


def _prose(prompt: str) -> str:
    """A prompt without its formulas."""
    text = prompt[-PROMPT_LENGTH:]
    parts = []
    end = 0
    for start, _, after in math_in_text.formulas(text):
        parts.append(text[end:start])
        end = after
    return " ".join([*parts, text[end:]])


def _letters_of(formula: str, is_read: bool) -> set[str]:
    """The variables of a formula; of one that is not read as a tree, its single letters."""
    text = clean(formula)
    if is_read and (node := read_formula(text)) is not None:
        # a subscript or a prime makes no other letter of it
        return {name[0] for name in symbols(node) if len(name.partition("_")[0].rstrip("'")) == 1}
    return set(_LETTER.findall(_STYLED.sub(_without_words, text)))


def _without_words(command: re.Match[str]) -> str:
    r"""Return the rest of a command's argument without words: nothing of `\text{mass}`, the letter of `\sqrt{m}`."""
    inner = command[1] or ""
    return " " if _WORD.search(inner) else f" {inner} "
