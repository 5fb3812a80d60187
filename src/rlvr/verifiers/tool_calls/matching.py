"""The match of a completion's calls with those that a task wants.

The measure is that of ToolRL (arXiv 2504.13958, section 3.3): names as multisets, then for each wanted call the best
call of the same name, by names and by values of parameters. It is 1 exactly when every wanted call has an equal call
and there is no other.

Invariants: calls are a multiset (their order does not count) unless `ordered`; each call is paired at most once, and
the pairing is the best one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlvr.verifiers.tool_calls.pairing import align, assign
from rlvr.verifiers.tool_calls.reading import ToolCall

TextMatch = Literal["exact", "bfcl"]

# Matches `-3`, `2.5`, `1e5`; not `1_000`, `0x1`, `nan`. The bounded digits keep `float` cheap.
_NUMBER = re.compile(r"[+-]?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?")
# `standardize_string` of BFCL (`bfcl_eval/eval_checker/ast_eval/ast_checker.py`), which also lowers the case and makes
# quotes alike.
_BFCL_IGNORED = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class Equality:
    """The rule by which two argument values are the same. True and 1 never are."""

    int_is_float: bool = True
    number_is_text: bool = False
    text: TextMatch = "exact"

    def same(self, found: Any, wanted: Any) -> bool:
        """Return True if two JSON values are the same, item by item."""
        # First, since `True == 1` in Python.
        if isinstance(found, bool) or isinstance(wanted, bool):
            return found is wanted
        if isinstance(found, dict) and isinstance(wanted, dict):
            return found.keys() == wanted.keys() and all(self.same(found[key], wanted[key]) for key in wanted)
        if isinstance(found, list) and isinstance(wanted, list):
            return len(found) == len(wanted) and all(map(self.same, found, wanted))
        if isinstance(found, str) and isinstance(wanted, str):
            return self._spelling(found) == self._spelling(wanted)
        if self.number_is_text and isinstance(found, str) != isinstance(wanted, str):
            found = _as_number(found)
            wanted = _as_number(wanted)
            return found is not None and found == wanted
        numbers = isinstance(found, (int, float)) and isinstance(wanted, (int, float))
        return ((numbers and self.int_is_float) or type(found) is type(wanted)) and bool(found == wanted)

    def _spelling(self, text: str) -> str:
        if self.text == "exact":
            return text
        return _BFCL_IGNORED.sub("", text).lower().replace("'", '"')


def _as_number(value: Any) -> float | None:
    if isinstance(value, str):
        if _NUMBER.fullmatch(value.strip()):
            return float(value)
        return None
    try:
        if isinstance(value, (int, float)):
            return float(value)
        return None
    # An int beyond every float.
    except OverflowError:
        return None


@dataclass(frozen=True)
class Argument:
    """Values that one argument may have: any of `values`, or left out where `optional`.

    `nested`: in mappings among the values every entry is again a list of acceptable values (BFCL).
    """

    values: Sequence[Any]
    optional: bool = False
    nested: bool = False

    def accepts(self, found: Any, equality: Equality) -> bool:
        return any(_acceptable(found, value, equality, self.nested) for value in self.values)


def _acceptable(found: Any, wanted: Any, equality: Equality, nested: bool) -> bool:
    if nested and isinstance(wanted, dict):
        # An entry that the gold does not name is too much.
        if not isinstance(found, dict) or not found.keys() <= wanted.keys():
            return False
        return all(
            # "" among the choices: the entry may be left out (BFCL's `possible_answer`).
            any(_acceptable(found[key], value, equality, True) for value in choices) if key in found else "" in choices
            for key, choices in wanted.items()
        )
    if nested and isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(
            _acceptable(one, other, equality, True) for one, other in zip(found, wanted, strict=True)
        )
    return equality.same(found, wanted)


@dataclass(frozen=True)
class Wanted:
    """One call that a task wants, and the defaults of its tool's parameters."""

    name: str
    arguments: Mapping[str, Argument]
    defaults: Mapping[str, Any]


@dataclass(frozen=True)
class Pair:
    """A wanted call beside a call of the same name: shares of parameter names, and number of values that agree."""

    names: float
    values: int

    @property
    def score(self) -> float:
        return self.names + self.values


def compare(wanted: Wanted, call: ToolCall, equality: Equality) -> Pair:
    """`names`: Jaccard index of the parameter names, in [0, 1]; `values`: how many arguments are as wanted.

    An optional argument that is left out counts as given right; an argument that only repeats its default is not
    counted.
    """
    counted = {
        key: value
        for key, value in call.arguments.items()
        if key in wanted.arguments or key not in wanted.defaults or not equality.same(value, wanted.defaults[key])
    }
    omitted = {key for key, argument in wanted.arguments.items() if argument.optional and key not in counted}
    # Jaccard index of the parameter names, ToolRL's r_param: |keys and wanted| / |keys or wanted|; 1 where neither has
    # any.
    keys = counted.keys() | omitted
    union = counted.keys() | wanted.arguments.keys()
    right = sum(
        argument.accepts(counted[key], equality) for key, argument in wanted.arguments.items() if key in counted
    )
    return Pair(len(keys & wanted.arguments.keys()) / len(union) if union else 1.0, right + len(omitted))


@dataclass(frozen=True)
class Match:
    """Agreement of calls with wanted calls, each part in [0, 1]: 1 is full agreement."""

    names: float
    """Jaccard index of the multisets of tool names."""
    parameters: float
    """Parameter names, averaged over the wanted calls."""
    values: float
    """Share of the wanted arguments that have the wanted value."""
    total: float
    """R_max / S_max of ToolRL."""


def match_calls(
    wanted: Sequence[Wanted],
    calls: Sequence[ToolCall],
    equality: Equality,
    ordered: bool = False,
    extra_calls_cost: bool = True,
) -> Match:
    """ToolRL's match: (r_name + sum of r_param + r_value over the best pairing) / (1 + calls + parameters wanted).

    That charges extra calls in r_name only, so that guessing many variants of a call pays. With `extra_calls_cost` the
    part of the denominator that belongs to calls grows with their number beyond the number wanted; without, it is the
    paper's.
    """
    # Without calls on either side the formula divides by zero: no calls where none are wanted is full agreement.
    if not wanted or not calls:
        part = float(len(wanted) == len(calls))
        return Match(part, part, part, part)
    # Rows are wanted calls, columns the calls that were made; None where the names differ, which cannot be paired with
    # a gain.
    table = [[compare(w, c, equality) if w.name == c.name else None for c in calls] for w in wanted]
    scores = [[pair.score if pair else 0.0 for pair in row] for row in table]
    pairs = [table[i][j] for i, j in (align if ordered else assign)(scores)]
    wanted_names = [w.name for w in wanted]
    called_names = [c.name for c in calls]
    # The Jaccard index of the two multisets.
    shared = Counter(wanted_names) & Counter(called_names)
    names = shared.total() / (Counter(wanted_names) | Counter(called_names)).total()
    parameters = sum(pair.names for pair in pairs if pair)
    values = sum(pair.values for pair in pairs if pair)
    parameter_count = sum(len(w.arguments) for w in wanted)
    if extra_calls_cost:
        # Not below 1: too few calls are charged already, by what they lack.
        stretch = max(1.0, len(calls) / len(wanted))
    else:
        stretch = 1.0
    if ordered and wanted_names != called_names:
        # Jaccard ignores order; with `ordered` no more names count than can be paired in order (the longest common
        # subsequence).
        in_order = align([[float(name == called) for called in called_names] for name in wanted_names])
        paired = sum(wanted_names[i] == called_names[j] for i, j in in_order)
        names = min(names, paired / max(len(wanted), len(calls)))
    return Match(
        names,
        parameters / len(wanted),
        values / parameter_count if parameter_count else parameters / len(wanted),
        # R_max / S_max of ToolRL: S_max = 1 + calls wanted + parameters wanted, the first 1 for the names.
        (names + parameters + values) / (1 + (len(wanted) + parameter_count) * stretch),
    )
