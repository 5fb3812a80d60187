"""`keywords:`: which words, and how often."""

from __future__ import annotations

import re

from rlvr.verifiers.instructions.instruction_registry import (
    Count,
    Letter,
    Phrase,
    Phrases,
    Relation,
    compared,
    constraint,
)
from rlvr.verifiers.invisible import folded


@constraint("keywords:existence")
def existence(text: str, *, keywords: Phrases) -> bool:
    """Every keyword occurs, in any case, perhaps inside a longer word ("art" in "party"), as in the original.

    The original reads keywords as regular expressions, so that "C++" raises; here they are literal.
    """
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in keywords)


@constraint("keywords:frequency")
def frequency(text: str, *, keyword: Phrase, frequency: Count, relation: Relation) -> bool:
    """The keyword occurs `less than` or `at least` so often, in any case, inside longer words too. Literal, as
    above."""
    count = len(re.findall(re.escape(keyword), text, re.IGNORECASE))
    if relation == "less than":  # letters that look alike must not hide one
        count = max(count, len(re.findall(re.escape(folded(keyword)), folded(text), re.IGNORECASE)))
    return compared(count, relation, frequency)


@constraint("keywords:forbidden_words")
def forbidden_words(text: str, *, forbidden_words: Phrases) -> bool:
    r"""None of the words occurs as a whole word, in any case.

    Literal, and bounded by what is no letter, digit or underscore: the original's `\bC\+\+\b` raises or never matches.
    Letters that look like those of the word are those of the word.
    """
    looks = folded(text)
    return not any(
        re.search(rf"(?<!\w){re.escape(written)}(?!\w)", where, re.IGNORECASE)
        for word in forbidden_words
        for written, where in ((word, text), (folded(word), looks))
    )


@constraint("keywords:letter_frequency")
def letter_frequency(text: str, *, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter (or other sign) occurs `less than` or `at least` so often, in any case."""
    count = text.lower().count(letter.lower())
    if let_relation == "less than":
        count = max(count, folded(text).lower().count(folded(letter).lower()))
    return compared(count, let_relation, let_frequency)
