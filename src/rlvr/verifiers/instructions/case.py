"""`change_case:` and `punctuation:`: capitals, lower case, commas."""

from __future__ import annotations

import re

from rlvr.verifiers.instructions.instruction_registry import Count, Relation, compared, constraint
from rlvr.verifiers.instructions.language import detect, detector_problem

# Matches `WELL-KNOWN`, `DON'T`, `U.S`; possessive, so that a long run of letters is not matched in every way.
_WORD = re.compile(r"\w+(?:['\u2019.\-]\w+)*+")
# Arabic, Chinese and Japanese (full and half width) and small commas.
_COMMA = re.compile("[,\u060c\u3001\uff0c\uff64\ufe50]")


@constraint("change_case:capital_word_frequency")
def capital_word_frequency(text: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """`less than` or `at least` so many words in capitals; hyphenated words are one, and "I" and "A" are words.

    The original's tokenizer (NLTK) cuts contractions: its "DON'T" is two, here one.
    """
    return compared(sum(match[0].isupper() for match in _WORD.finditer(text)), capital_relation, capital_frequency)


@constraint("change_case:english_capital", detector_problem)
def english_capital(text: str) -> bool:
    """English, and no letter in lower case. A text whose language cannot be told follows the original; here it does
    not."""
    return text.isupper() and detect(text) == "en"


@constraint("change_case:english_lowercase", detector_problem)
def english_lowercase(text: str) -> bool:
    """English, and no letter in capitals. A text whose language cannot be told follows the original; here it does
    not."""
    return text.islower() and detect(text) == "en"


@constraint("punctuation:no_comma")
def no_comma(text: str) -> bool:
    """No comma; those of other scripts and widths are commas too, which the original lets pass."""
    return _COMMA.search(text) is None
