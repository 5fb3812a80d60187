"""Keywords of JSON Schema in bounded time, for the library jsonschema, which matches patterns, compares items and
follows references without limit.

Invariants: a pattern is searched for under a time limit, wherever the schema has it; equal items are found in linear
time; what a `$ref` leads to is checked once for each value of the document, within `references_followed_once`;
`multipleOf` is decided on the decimal numbers as written. Each function has the library's form: validator, value of the
keyword, instance, schema -> errors. Source: JSON Schema draft 2020-12, validation 6.2 to 6.4 and core 10 and 11.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

# Matches `$`, `\$`, `[$]`; not `a`. Escapes and classes are consumed, so that only a bare dollar is replaced.
_DOLLAR = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
"""A dollar sign that is no text; what is escaped or in a class is passed over."""
PATTERN_SECONDS = 0.2
"""Seconds for one pattern of a schema on one text; honest ones take microseconds."""
_FOLLOWED: ContextVar[dict[tuple[int, int], bool] | None] = ContextVar("references followed", default=None)
"""(id of a schema, id of a value) -> whether the value fits the schema, while one document is checked."""


def _error(message: str) -> Any:
    import jsonschema

    return jsonschema.ValidationError(message)


def _occurs(pattern: str, text: str) -> bool:
    """Return True if a pattern occurs in a text; raises TimeoutError if that takes too long."""
    import regex  # as `re`, with a time limit

    return regex.search(_as_ecma(pattern), text, flags=regex.ASCII, timeout=PATTERN_SECONDS) is not None


@functools.lru_cache(maxsize=256)
def _as_ecma(pattern: str) -> str:
    r"""A pattern of ECMA-262 as one of `regex`: there `$` is the end of the text, here it also stands before a last
    line break.

    Classes of characters are ASCII in both (`\d`), by a flag. Source: ECMA-262, 22.2.2.
    """
    return _DOLLAR.sub(lambda token: r"\Z" if token[0] == "$" else token[0], pattern)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `pattern`, within a time limit."""
    if validator.is_type(instance, "string") and not _occurs(pattern, instance):
        yield _error(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `patternProperties`, within a time limit for each key."""
    if validator.is_type(instance, "object"):
        for pattern, subschema in patterns.items():
            for key, value in instance.items():
                if _occurs(pattern, key):
                    yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `additionalProperties`, within a time limit for each key and pattern that may allow it."""
    if not validator.is_type(instance, "object"):
        return
    named = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    others = [
        (key, value)
        for key, value in instance.items()
        if key not in named and not any(_occurs(pattern, key) for pattern in patterns)
    ]
    yield from _others(validator, allowed, others, "Additional properties are not allowed ({!r} was unexpected)")


def _unevaluated_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `unevaluatedProperties`, within a time limit for each key and pattern that may evaluate it."""
    if not validator.is_type(instance, "object"):
        return
    evaluated = _evaluated(validator, instance, _without(schema, "unevaluatedProperties"), _own_keys)
    others = [(key, value) for key, value in instance.items() if key not in evaluated]
    yield from _others(validator, allowed, others, "Unevaluated properties are not allowed ({!r} was unexpected)")


def _unevaluated_items(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `unevaluatedItems` of draft 2020-12, in linear time."""
    if not validator.is_type(instance, "array"):
        return
    evaluated = _evaluated(validator, instance, _without(schema, "unevaluatedItems"), _own_indices)
    others = [(index, value) for index, value in enumerate(instance) if index not in evaluated]
    yield from _others(validator, allowed, others, "Unevaluated items are not allowed (item {} was unexpected)")


def _others(validator: Any, allowed: Any, others: Iterable[tuple[Any, Any]], message: str) -> Iterator[Any]:
    """The errors of the (key or index, value) pairs that no other keyword applies to; `allowed` is their schema."""
    for place, value in others:
        if allowed is False:
            yield _error(message.format(place))
        else:
            yield from validator.descend(value, allowed, path=place)


def _without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != keyword}


def _evaluated(validator: Any, instance: Any, schema: Any, own: Callable[..., set[Any]]) -> set[Any]:
    """The keys or indices of `instance` that a schema which it fits applies a subschema to, itself or by its parts."""
    if not isinstance(schema, dict):
        return set()
    evaluated = own(validator, instance, schema)
    for part_validator, part in _parts(validator, instance, schema):
        if part_validator.evolve(schema=part).is_valid(instance):
            evaluated |= _evaluated(part_validator, instance, part, own)
    return evaluated


def _parts(validator: Any, instance: Any, schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(validator, subschema) for all that a schema applies to the same instance."""
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(keyword, ()):
            yield validator, part
    if isinstance(instance, dict):
        for key, part in schema.get("dependentSchemas", {}).items():
            if key in instance:
                yield validator, part
    if "if" in schema:
        fits = validator.evolve(schema=schema["if"]).is_valid(instance)
        yield validator, schema["if"]
        yield validator, schema.get("then" if fits else "else", True)
    for keyword in ("$ref", "$dynamicRef"):
        if keyword in schema:
            target = validator._resolver.lookup(schema[keyword])
            yield validator.evolve(schema=target.contents, _resolver=target.resolver), target.contents
    if "$recursiveRef" in schema:  # of draft 2019-09
        from referencing.jsonschema import lookup_recursive_ref

        target = lookup_recursive_ref(validator._resolver)
        yield validator.evolve(schema=target.contents, _resolver=target.resolver), target.contents


def _own_keys(validator: Any, instance: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return set(instance)  # the instance fits, so each key has passed the one or the other
    matched = {key for pattern in schema.get("patternProperties", ()) for key in instance if _occurs(pattern, key)}
    return matched | (instance.keys() & schema.get("properties", {}).keys())


def _own_indices(validator: Any, instance: list[Any], schema: dict[str, Any]) -> set[int]:
    if "items" in schema or "unevaluatedItems" in schema:
        return set(range(len(instance)))
    indices = set(range(len(schema.get("prefixItems", ()))))
    if "contains" in schema:
        contained = validator.evolve(schema=schema["contains"])
        indices |= {index for index, value in enumerate(instance) if contained.is_valid(value)}
    return indices


@contextlib.contextmanager
def references_followed_once() -> Iterator[None]:
    """For the check of one document, which must stay alive: each target of a `$ref` is checked once against each of its
    values."""
    before = _FOLLOWED.set({})
    try:
        yield
    finally:
        _FOLLOWED.reset(before)


def _ref(validator: Any, reference: str, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `$ref`. Two references of an `anyOf` that lead back to it would double the work at each level of a
    document."""
    followed = _FOLLOWED.get()
    # Identity, since values need not be hashable; the document stays alive for the whole check, so that no id is used
    # twice.
    key = id(validator._resolver.lookup(reference).contents), id(instance)
    if followed is not None and key in followed:
        if not followed[key]:
            yield _error(f"{instance!r} does not fit {reference!r}")
        return
    fits = True
    for error in validator._validate_reference(ref=reference, instance=instance):
        fits = False
        if followed is not None:
            followed[key] = False  # before the error is given out: who asks for the first one only never comes back
        yield error
    if fits and followed is not None:
        followed[key] = True


def _multiple_of(validator: Any, divisor: float, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `multipleOf` on decimal numbers: 0.07 is 7 times 0.01, which the nearest binary fractions are not."""
    if validator.is_type(instance, "number") and (_exact(instance) / _exact(divisor)).denominator != 1:
        yield _error(f"{instance!r} is not a multiple of {divisor}")


def _exact(number: float) -> Fraction:
    if isinstance(number, int):
        return Fraction(number)
    # repr gives the shortest decimal that reads back as the float: 0.07, as the document wrote it.
    return Fraction(repr(number))


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `uniqueItems`, in linear time."""
    if wanted and validator.is_type(instance, "array") and len(set(map(_key, instance))) < len(instance):
        yield _error("two items of the array are equal")


def _key(value: Any) -> Hashable:
    """Return a key that is the same for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return dict, frozenset((name, _key(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return list, tuple(map(_key, value))
    return isinstance(value, bool), value


BOUNDED = {
    "$ref": _ref,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
    "multipleOf": _multiple_of,
    "uniqueItems": _unique_items,
}
"""Keyword -> its check, in place of the library's."""
