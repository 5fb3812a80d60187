"""The match of a completion's calls with those that a task wants.

The measure is that of ToolRL (arXiv 2504.13958, section 3.3): names as multisets, then for each wanted call the best
call of the same name, by names and by values of parameters. It is 1 exactly when every wanted call has an equal call
and there is no other.

Invariants: calls are a multiset (their order does not count) unless `ordered`; each call is paired at most once, and
the pairing is the best one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.verifiers.documents import JsonEquality
from rlvr.verifiers.tool_calls.pairing import align, assign
from rlvr.verifiers.tool_calls.reading import ToolCall


@dataclass(frozen=True)
class Argument:
    """Values that one argument may have: any of `values`, or left out where `optional`.

    `nested`: in mappings among the values every entry is again a list of acceptable values (BFCL).
    """

    values: Sequence[Any]
    optional: bool = False
    nested: bool = False

    def accepts(self, found: Any, equality: JsonEquality) -> bool:
        return any(_acceptable(found, value, equality, self.nested) for value in self.values)


def _acceptable(found: Any, wanted: Any, equality: JsonEquality, nested: bool) -> bool:
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


def compare(wanted: Wanted, call: ToolCall, equality: JsonEquality) -> tuple[float, int]:
    """A wanted call beside a call of the same name: (Jaccard index of the parameter names, number of values as wanted).

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
    return len(keys & wanted.arguments.keys()) / len(union) if union else 1.0, right + len(omitted)


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
    equality: JsonEquality,
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
    scores = [[sum(pair) if pair else 0.0 for pair in row] for row in table]
    pairs = [table[i][j] for i, j in (align if ordered else assign)(scores)]
    wanted_names = [w.name for w in wanted]
    called_names = [c.name for c in calls]
    # The Jaccard index of the two multisets.
    shared = Counter(wanted_names) & Counter(called_names)
    names = shared.total() / (Counter(wanted_names) | Counter(called_names)).total()
    parameters = sum(pair[0] for pair in pairs if pair)
    values = sum(pair[1] for pair in pairs if pair)
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
