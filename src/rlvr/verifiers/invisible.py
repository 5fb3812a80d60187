"""Characters that nobody sees, and letters that look like others: what a text says to a reader.

Invariant: both functions take linear time and never raise.
"""

# ruff: noqa: RUF001 - letters that look alike are what this file is about

from __future__ import annotations

import html
import re
import unicodedata

# Matches `&nbsp;`, `&#160;`, `&#x200B;`; not `&amp;`, `&lt;`.
_ENTITY = re.compile(
    r"&(?:nbsp|ensp|emsp|thinsp|hairsp|numsp|zwnj|zwj|shy|ZeroWidthSpace|NoBreak|lrm|rlm"
    r"|#0*(?:32|160|173|820[0-7]|8239|8288|65279)(?!\d)|#[xX]0*(?:20|[aA]0|[aA][dD]|200[0-9a-fA-F]|202[fF]|2060"
    r"|[fF][eE][fF][fF])(?![0-9a-fA-F]));?"
)
"""HTML entities of spaces and of what is not shown."""
_BLANK = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffc")
"""Letters and symbols without a picture."""
_TWINS = str.maketrans(
    "АВЕЅІЈКМНОРСТУХаеѕіјорсухԁԛԝһВΑΒΕΖΗΙΚΜΝΟΡΤΥΧοιαυνρɑɡıⅼⅠսօհոզց",
    "ABESIJKMHOPCTYXaesijopcyxdqwhBABEZHIKMNOPTYXoiauvpagilIuohnqg",
)
"""Cyrillic, Greek, Armenian and phonetic letters -> the Latin letter that they are read as."""


def visible(text: str) -> str:
    """`text` without characters that nobody sees, written as they are or as HTML entities; `&nbsp;` is a space."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if text.isascii():
        return text
    return "".join(
        char for char in text if char not in _BLANK and (char in "\n\t" or unicodedata.category(char) != "Cf")
    )


def folded(text: str) -> str:
    """`text` in the letters that it looks like: compatibility forms, letters of other scripts, struck-through
    letters."""
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFKC", text).translate(_TWINS)
    # Mn and Me: combining marks, with which letters are struck through or stacked.
    return "".join(char for char in composed if unicodedata.category(char) not in ("Mn", "Me"))
