"""Text that anyone may have written, made fit to show.

Invariants:
- What comes out holds no control character but newline, and no lone surrogate: it cannot move a cursor, colour a
  terminal, forge a line or fail to encode as UTF-8.
- What is replaced is shown as its Python escape (`\\x1b`), so that nothing vanishes.
"""

from __future__ import annotations

import re

# C0, C1 and DEL; line and paragraph separators; marks that turn the direction of writing; lone surrogates. Matches the
# "\x1b" of "\x1b[31m" and "\u202e"; must not match "\n", "é" or an emoji, which are valid outside of these ranges.
_ODD = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object) -> str:
    """`text` with tabs as spaces, Windows line ends as newlines and every other odd character escaped."""
    plain = str(text).replace("\r\n", "\n").replace("\t", "    ")
    return _ODD.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), plain)


def shorten(text: str, limit: int) -> str:
    """`text` in about `limit` characters: a third from its head, the rest from its tail, where answers are."""
    if len(text) <= limit:
        return text
    # A final answer is at the end, so the tail gets two thirds.
    head = limit // 3
    tail = limit - head
    return f"{text[:head]} [... {len(text) - limit} characters ...] {text[-tail:]}"


# The two non-ASCII signs that the console itself writes: `±` and the bars of a sparkline, as digits 1 to 8.
_ASCII = str.maketrans({"±": "+-", **{bar: str(height) for height, bar in enumerate("▁▂▃▄▅▆▇█", start=1)}})


def encodable(text: str, encoding: str) -> str:
    """`text` as a stream of that encoding can hold it; what it cannot is shown as its escape."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text
