"""Whether a program surely does the same whenever it is run, so that its verdict may be remembered.

A guess at random has to be drawn anew for each answer: remembered, one lucky draw would pay them all. No list of the ways to
randomness is complete (`eval('_' + '_imp' ...)`), so this is one of what is harmless: a program without imports, underscored names
and characters beyond ASCII, that mentions no builtin and no name of its task's prelude but those below.

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

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEADY_WORDS = """
    abs all any ascii bin bool bytearray bytes chr complex dict divmod enumerate filter float frozenset hex input int
    isinstance issubclass iter len list map max min next oct ord pow print range repr reversed round slice sorted str sum tuple zip
    True False None Ellipsis NotImplemented property staticmethod classmethod super exit quit

    List Dict Set Tuple Optional Union Any Callable Iterable Iterator Sequence Deque DefaultDict
    collections deque defaultdict Counter OrderedDict popleft appendleft extendleft rotate most_common elements
    heapq heappush heappop heapify heappushpop heapreplace nlargest nsmallest bisect bisect_left bisect_right insort insort_left
    math ceil floor sqrt isqrt gcd lcm log log2 log10 exp sin cos tan pi inf factorial comb perm prod fabs hypot
    itertools accumulate chain combinations combinations_with_replacement count cycle groupby islice pairwise permutations product
    repeat starmap takewhile dropwhile zip_longest functools cache lru_cache reduce cmp_to_key partial
    copy deepcopy ascii_lowercase ascii_uppercase digits ListNode TreeNode val next left right
"""
_STEADY = frozenset(_STEADY_WORDS.split())
"""Builtins and names of the prelude that give the same whenever they are called."""
_SETS = frozenset({"set", "hash", "id"})
"""The order of a set of strings differs from one sandbox to the next."""


def is_steady(program: str, preludes: Iterable[str]) -> bool:
    """Whether a program does the same each time; `preludes` are the texts that the task puts before it."""
    if not program.isascii():  # identifiers are normalised: there are other ways to write `eval`
        return False
    words = set(_WORD.findall(program))
    if words & {"import", *_SETS} or any(word.startswith("_") and word != "_" for word in words):
        return False
    risky = _builtins() - _STEADY
    for prelude in preludes:
        if prelude.startswith(IMPORTS):
            risky |= _imported() - _STEADY
            prelude = prelude.removeprefix(IMPORTS).replace(NODES, "")
        names = bound(prelude)
        if "*" in names:
            return False
        risky |= names - _STEADY
    return not words & risky


@functools.cache
def _builtins() -> frozenset[str]:
    exceptions = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    return frozenset(dir(builtins)) - exceptions


@functools.cache
def _imported() -> frozenset[str]:
    """What `IMPORTS` may bind, and what its modules hold."""
    return (
        frozenset(STARRED).union(*(dir(importlib.import_module(name)) for name in STARRED))
        - set(dir(str))
        - set(dir(list))
    )
