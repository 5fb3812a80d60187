"""JSON documents in a completion: where one stands, and reading it strictly.

There is one document or none: a completion with two is refused, so it cannot be paid for several guesses. Reading
refuses what `json.loads` lets through and a consumer of the document may read otherwise: keys given twice, NaN and
Infinity, numbers too large for a float, nesting beyond a limit.

Invariants: the only error is DocumentError, which says why in words; time is linear in the text.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Where = Literal["whole", "fenced", "either"]
TextMatch = Literal["exact", "bfcl"]

MAX_LENGTH = 100_000
# json.loads and the comparisons here recurse once for each level, far below the limit of 1,000 frames.
MAX_DEPTH = 64

# Matches `-3`, `2.5`, `1e5`; not `1_000`, `0x1`, `nan`. The bounded digits keep `float` cheap.
_NUMBER = re.compile(r"[+-]?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?")
# `standardize_string` of BFCL (`bfcl_eval/eval_checker/ast_eval/ast_checker.py`), which also lowers the case and makes
# quotes alike.
_BFCL_IGNORED = re.compile(r"[ ,./\-_*^]")
# Matches '```json', '```'; not '`json`'. CommonMark 4.5: at most three spaces, three or more backticks, none of them in
# the info string.
_FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^`\s]*)[^`]*")
# Matches `"a\"b"`, `{`; not `a`. A string is one token, so that brackets in it do not count. The possessive `*+` keeps
# an unclosed string linear.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


class DocumentError(ValueError):
    """There is no document, or it is not one that everybody reads alike; the text says why."""


def find_document(text: str, where: Where = "either", language: str = "json") -> str:
    """The text of the one document in `text` (what comes after the reasoning).

    `whole`: all of the text. `fenced`: the one fenced block that is marked with `language` or not marked; prose and
    blocks in other languages may stand around it, but no second JSON object. `either`: `fenced` where the text has such
    a block, else `whole`.
    """
    blocks, rest = ([], "") if where == "whole" else _fenced_blocks(text, language)
    if len(blocks) > 1:
        raise DocumentError(f"{len(blocks)} fenced blocks where one document is expected")
    if blocks and language == "json" and _holds_document(rest, lists=blocks[0].lstrip().startswith("[")):
        raise DocumentError("another JSON document stands beside the fenced block")
    if not blocks and where == "fenced":
        raise DocumentError("no fenced block")
    document = (blocks[0] if blocks else text).strip()
    if not document:
        raise DocumentError("nothing where the document should be")
    return document


def _holds_document(text: str, lists: bool) -> bool:
    """Return True if the text holds a JSON object that is not empty, or a list of such; with `lists` any list that is
    not empty."""
    for span in _bracketed(text):
        try:
            value = json.loads(span)
        except (ValueError, RecursionError):
            continue
        if lists and value and isinstance(value, list):
            return True
        members = value if isinstance(value, list) else [value]
        if any(isinstance(member, dict) and member for member in members):
            return True
    return False


def _bracketed(text: str) -> Iterator[str]:
    """Yield the texts in outermost brackets."""
    depth = start = 0
    for token in _JSON_TOKEN.finditer(text):
        if token[0] in "[{":
            start = start if depth else token.start()
            depth += 1
        elif token[0] in "]}" and depth:
            depth -= 1
            if not depth:
                yield text[start : token.end()]


def _fenced_blocks(text: str, wanted: str) -> tuple[list[str], str]:
    """The blocks in the wanted language or in none, and all the rest of the text."""
    blocks: list[str] = []
    rest: list[str] = []
    lines: list[str] = []
    open_fence = language = ""
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line)
        if not open_fence:
            if fence:
                open_fence = fence[1]
                language = fence[2].casefold()
                lines = []
            else:
                rest.append(line)
        # CommonMark 4.5: a closing fence has no info string and at least as many backticks as the opening one.
        elif fence and not fence[2] and len(fence[1]) >= len(open_fence):
            if language in ("", wanted):
                blocks.append("".join(lines))
            else:
                rest += lines
            open_fence = ""
        else:
            lines.append(line)
    if open_fence:
        raise DocumentError("a fenced block is not closed")
    return blocks, "".join(rest)


def read_json(text: str, max_length: int = MAX_LENGTH, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON document (RFC 8259), strictly."""
    if len(text) > max_length:
        raise DocumentError(f"the document has {len(text)} characters, over the limit of {max_length}")
    steps = ((token[0] in "[{") - (token[0] in "]}") for token in _JSON_TOKEN.finditer(text))
    if any(depth > max_depth for depth in itertools.accumulate(steps)):
        raise DocumentError(f"the document is nested more than {max_depth} deep")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except DocumentError:
        raise
    except (ValueError, RecursionError) as error:  # RecursionError: a max_depth beyond what Python can read
        raise DocumentError(f"not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DocumentError(f"the key {twice[:80]!r} is given twice")
    return members


def _refuse(constant: str) -> Any:
    raise DocumentError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise DocumentError(f"the number {number[:40]} is too large")
    return value


@dataclass(frozen=True)
class JsonEquality:
    """The rule by which two JSON values are the same. By default 1 is 1.0, but true is never 1, nor is "1"."""

    int_is_float: bool = True
    number_is_text: bool = False
    text: TextMatch = "exact"

    def same(self, found: Any, wanted: Any) -> bool:
        """Return True if two JSON values, at most MAX_DEPTH deep, are the same, item by item."""
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
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        return None
    try:
        return float(value)
    except (TypeError, OverflowError):  # no number, or an int beyond every float
        return None


same_json = JsonEquality().same


def matched_fields(found: Any, expected: Any) -> float:
    """The share of fields on which two JSON values agree, in [0, 1]: fields equal in both, over fields in either.

    A field is a number, text, truth value, null or empty container, with the path of keys and positions that leads to
    it. So what is missing costs, and so does what was added.
    """
    one = dict(_fields(found))
    other = dict(_fields(expected))
    same = sum(path in other and same_json(value, other[path]) for path, value in one.items())
    return same / (len(one) + len(other) - sum(path in other for path in one))


def _fields(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    fields = [field for key, inner in items for field in _fields(inner, (*path, key))]
    return fields or [(path, value)]
