"""`length_constraints:`: how many words, sentences and paragraphs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlvr.verifiers.instructions.instruction_registry import Count, Phrase, Position, Relation, compared, constraint
from rlvr.verifiers.instructions.sentences import count_sentences

_WORD = re.compile(r"\w+")
# Space and quotes before the word, which ends at space or punctuation: `"Well, yes` gives `Well`.
_FIRST_WORD = re.compile(r"[\s'\"]*([^\s.,?!'\"]*)")


@constraint("length_constraints:number_words")
def number_words(text: str, *, num_words: Count, relation: Relation) -> bool:
    r"""`less than` or `at least` so many words: runs of `\w`, as in the original ("don't" is two)."""
    return compared(sum(1 for _ in _WORD.finditer(text)), relation, num_words)


@constraint("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: Count, relation: Relation) -> bool:
    """`less than` or `at least` so many sentences; `sentences` says how they are cut, and how punkt differs."""
    return compared(count_sentences(text), relation, num_sentences)


@constraint("length_constraints:number_paragraphs")
def number_paragraphs(text: str, *, num_paragraphs: Count) -> bool:
    """Exactly so many paragraphs, separated by the Markdown divider `***`, which may also open or close the text.

    As in the original, two dividers with nothing between them follow nothing, and a divider inside a line counts.
    """
    paragraphs = [paragraph.strip() for paragraph in text.split("***")]
    if not all(paragraphs[1:-1]):
        return False
    return sum(bool(paragraph) for paragraph in paragraphs) == num_paragraphs


def _nth_problem(arguments: Mapping[str, Any]) -> str | None:
    if arguments["nth_paragraph"] > arguments["num_paragraphs"]:
        return "nth_paragraph is beyond num_paragraphs: nothing can follow it"
    return None


@constraint("length_constraints:nth_paragraph_first_word", _nth_problem)
def nth_paragraph_first_word(text: str, *, num_paragraphs: Count, nth_paragraph: Position, first_word: Phrase) -> bool:
    r"""Exactly so many paragraphs, separated by blank lines (`\n\n`), and the nth begins with a word, in any case.

    The original counts blank paragraphs out but lets them shift the numbering (four newlines in a row); here they are
    dropped before both.
    """
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs:
        return False
    first = _FIRST_WORD.match(paragraphs[nth_paragraph - 1])
    return first is not None and first[1].lower() == first_word.lower()
