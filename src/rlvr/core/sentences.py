"""Cutting a text into sentences by rules, without a trained model.

IFEval uses NLTK's punkt, whose model is a download. Here a sentence ends at `.`, `!`, `?` or an ellipsis, closing
quotes and brackets included, where space or the end of the text follows, and at a full-width stop anywhere. A full stop
does not end a sentence after a listed abbreviation, an initial ("J. Smith", "e.g.", but not "plan B.") or a number that
opens a line ("1. First"). As in punkt, the end of a line alone ends no sentence.

Where it differs: punkt's list of abbreviations is longer, and it ends a sentence after one that a frequent sentence
starter follows; it also counts pieces without any letter or digit, which here are none (". . ." is no sentence).

Invariant: time linear in the text.
"""

from __future__ import annotations

import re

# Quotes, brackets, and Markdown's marks of emphasis (`*`, `_`).
_CLOSERS = "\"'\u201d\u2019\u00bb)]*_"
# Matches the end of `Go!`, `"Yes."`, `Wait...`; not the point of `3.14` or `a.b`, since space must follow. Possessive,
# and not behind another stop, so that a megabyte of stops is read once.
_END = re.compile(
    rf"(?<![.!?\u2026])[.!?\u2026]++[{re.escape(_CLOSERS)}]*+(?=\s|\Z)"
    "|[\u3002\uff01\uff1f\uff61]++[\u300d\u300f\u201d\u2019\uff09]*+"  # full-width stops and closing marks
)
_LAST_WORD = re.compile(r"[\w.]*\Z")
_WORD = re.compile(r"\w")
# Characters that are looked at before a stop: bounds the work for each stop. No abbreviation is longer.
_LONGEST_WORD = 32

_ABBREVIATIONS = frozenset(
    """mr mrs ms dr prof rev hon st messrs mme mlle gen col maj capt cmdr lt sgt gov sen rep pres supt bros dept univ
    assn vs cf approx fig eq eqs secs vol vols eds nos pp jan feb mar apr jun jul aug sep sept oct nov dec tues thurs
    fri blvd mt viz""".split()  # noqa: SIM905
)
"""Abbreviations that stand before what they belong to: a stop after one ends no sentence."""

_CLOSING = frozenset("etc jr sr inc ltd co corp est ave rd ft ph.d al".split())  # noqa: SIM905
"""Abbreviations that may close a sentence, as initials may ("U.S.", "a.m."): they do where a capital letter follows."""


_LETTERED = frozenset(
    """answer appendix block case category chapter choice class column combination exhibit figure form gate grade group
    hepatitis item key letter level line model option panel part phase plan player point position question row scenario
    schedule section series set side size solution step student table team terminal theorem type unit variable variant
    version vitamin zone""".split()  # noqa: SIM905
)
"""Words that a single letter names one of: a stop after the letter may end a sentence."""


def sentences(text: str) -> list[tuple[int, int]]:
    """(first character, past-the-end character) of each sentence: the pieces between ends that hold a letter or digit,
    with the space before them."""
    spans = []
    start = 0
    for end in _END.finditer(text):
        has_word = _WORD.search(text, start, end.start()) is not None
        if not has_word or _ends_sentence(text, end):
            if has_word:
                spans.append((start, end.end()))
            start = end.end()
    if _WORD.search(text, start) is not None:
        spans.append((start, len(text)))
    return spans


def _ends_sentence(text: str, end: re.Match[str]) -> bool:
    # `!`, `?` and several stops end a sentence whatever stands before them.
    if end[0].rstrip(_CLOSERS) != ".":
        return True
    last = _LAST_WORD.search(text, max(0, end.start() - _LONGEST_WORD), end.start())
    word = last[0].lower() if last else ""
    # `1. First` at the start of a line is the number of an item; `in 1999.` ends a sentence.
    if word.isdigit() and last is not None:
        line = text[max(0, last.start() - _LONGEST_WORD) : last.start()].rpartition("\n")[2]
        return line.strip(" \t*_#>-") != ""
    # `e.g`, `U.S`, `a.m`: single letters between stops.
    initials = word.split(".")
    if word in _CLOSING or (len(initials) > 1 and all(len(part) == 1 for part in initials)):
        return _capital_follows(text, end.end())
    # `J. Smith` is an initial; `plan B.`, `the value of x.` and `I.` are not.
    if last is not None and len(word) == 1 and word.isalpha() and word != "i":
        before = _LAST_WORD.search(text, max(0, last.start() - _LONGEST_WORD), last.start() - 1)
        is_name = last[0].islower() or (before is not None and before[0].lower() in _LETTERED)
        return is_name and _capital_follows(text, end.end())
    return word not in _ABBREVIATIONS


def _capital_follows(text: str, position: int) -> bool:
    following = text[position : position + _LONGEST_WORD].lstrip()
    return not following or following[0].isupper()
