"""Programs that surely do the same whenever they are run, so that their verdict may be remembered.

A guess at random has to be drawn anew for each answer: remembered, one lucky draw would pay them all. No list of the
ways to randomness is complete (`eval('_' + '_imp' ...)`), so this is one of what is harmless: a program without
imports, underscored names and characters beyond ASCII, that mentions no builtin and no name of its task's prelude but
those below. Without any of these, two things still differ from one interpreter to the next, and a program that could
look at them is refused: the order of a set (texts are hashed with a random seed, functions and `None` by their
address), and the text of an object, which holds its address.

Invariant: the program's words are looked at, it is never parsed.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import re
from collections.abc import Iterable

from rlvr.verifiers.code.names import bound
from rlvr.verifiers.code.preludes import IMPORTS, NODES, STARRED

# Words of comments and texts count too: a program is refused rather than looked at more closely.
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEADY_WORDS = """
    abs all any bin bool bytearray bytes chr complex dict divmod enumerate filter float hex input int
    isinstance issubclass iter len list map max min next oct ord pow print range reversed round slice sorted sum tuple
    zip True False None Ellipsis NotImplemented property staticmethod classmethod super exit quit

    List Dict Set Tuple Optional Union Any Callable Iterable Iterator Sequence Deque DefaultDict
    collections deque defaultdict Counter OrderedDict popleft appendleft extendleft rotate most_common elements
    heapq heappush heappop heapify heappushpop heapreplace nlargest nsmallest bisect bisect_left bisect_right insort
    insort_left math ceil floor sqrt isqrt gcd lcm log log2 log10 exp sin cos tan pi inf factorial comb perm prod fabs
    hypot itertools accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise
    permutations product repeat starmap takewhile dropwhile zip_longest functools cache lru_cache reduce cmp_to_key
    partial copy deepcopy ascii_lowercase ascii_uppercase digits ListNode TreeNode val next left right
"""
_STEADY = frozenset(_STEADY_WORDS.split())
"""Builtins and names of the prelude that give the same whenever they are called."""
_UNSTEADY = frozenset({"import", "set", "frozenset", "hash", "id", "str", "repr", "ascii", "format", "format_map"})
"""Words of sets, addresses and the texts of objects; also where they are a method's (`'{}'.format`) or part of a
text."""
_ANNOTATED = re.compile(r"^[ \t]*def \w+\([\w\s:,.\[\]|*]*\)(?:[ \t]*->[\w.\[\], |\t]+|[ \t]*):[ \t]*$", re.MULTILINE)
"""The head of a function without default values, where `str` is an annotation."""
_BRACE = re.compile(r"""\{(?!\s*\}|\s*(?!lambda\b)(?:\w+|'[^'\\\n]*'|"[^"\\\n]*")\s*:(?!=))""")
"""A brace that may begin a set: neither `{}` nor one whose first item is a name, number or plain text with a colon."""
_FORMATTED = re.compile(r"""\b(?:f|rf|fr)['"]""", re.IGNORECASE)
_VIEWS = frozenset({"keys", "items"})
"""Views of a dict, which the operators of sets make into sets."""
_SET_OPERATORS = frozenset("&|^-")
_LONG_TEXT = re.compile(r"""\"{3}|'{3}|\\[^nt]""")
"""Signs of a text of several lines, or one that writes a character as a number."""
_PERCENT_MADE = frozenset({"bytearray", "bytes", "chr", "decode", "encode", "to_bytes", "translate"})
"""Words that make a text of numbers, `%` included."""


def is_steady(program: str, preludes: Iterable[str]) -> bool:
    """Return True if a program does the same each time; `preludes` are the texts that the task puts before it."""
    if not program.isascii():  # identifiers are normalised: there are other ways to write `eval`
        return False
    # `str` as an annotation in the head of a function does nothing, so it is blanked out before the words are counted.
    words = set(_WORD.findall(_ANNOTATED.sub(lambda head: re.sub(r"\bstr\b", " ", head[0]), program)))
    # Underscored names lead from any object to all others (`().__class__.__base__.__subclasses__()`).
    if words & _UNSTEADY or any(word.startswith("_") and word != "_" for word in words):
        return False
    # `{1, 2}` is a set, and `d.keys() & e.keys()` makes one.
    if _BRACE.search(program) or (words & _VIEWS and _SET_OPERATORS.intersection(program)):
        return False
    # `f'{f}'` and `'%s' % f` write the address of a function.
    if _FORMATTED.search(program) or _may_format(program, words):
        return False
    risky = _builtins() - _STEADY
    for prelude in preludes:
        # The prelude of harnesses is known word for word; only what a task adds is parsed.
        if prelude.startswith(IMPORTS):
            risky |= _imported() - _STEADY
            prelude = prelude.removeprefix(IMPORTS).replace(NODES, "")
        names = bound(prelude)
        if "*" in names:
            return False
        risky |= names - _STEADY
    return not words & risky


def _may_format(program: str, words: set[str]) -> bool:
    """Return True if a `%` in a program may format a text, since it is not surely the remainder of a division."""
    if "%" not in program:
        return False
    # By lines: a `%` on a line without a quote is a remainder, unless a text may be built in another way (below).
    in_text = any("%" in line and ("'" in line or '"' in line) for line in program.split("\n"))
    return in_text or bool(words & _PERCENT_MADE) or _LONG_TEXT.search(program) is not None


@functools.cache
def _builtins() -> frozenset[str]:
    exceptions = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    return frozenset(dir(builtins)) - exceptions


@functools.cache
def _imported() -> frozenset[str]:
    """Return the names that `IMPORTS` may bind: its modules and all names in them, less the methods of texts and
    lists."""
    return (
        frozenset(STARRED).union(*(dir(importlib.import_module(name)) for name in STARRED))
        - set(dir(str))
        - set(dir(list))
    )
