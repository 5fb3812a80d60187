"""The constraints of IFEval (arXiv 2311.07911) by family, but for that of language.py: pure functions of the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlvr.core.sentences import sentences
from rlvr.verifiers.documents import DocumentError, read_json
from rlvr.verifiers.instructions.instruction_registry import (
    Count,
    Letter,
    Phrase,
    Phrases,
    Position,
    Relation,
    compared,
    constraint,
)
from rlvr.verifiers.instructions.language import detect, detector_problem
from rlvr.verifiers.invisible import folded

_WORD = re.compile(r"\w+")
# Space and quotes before the word, which ends at space or punctuation: `"Well, yes` gives `Well`.
_FIRST_WORD = re.compile(r"[\s'\"]*([^\s.,?!'\"]*)")
# Matches `[name]`; not `[a[b]` as a whole, nor one over several lines. The original's `\[.*?\]` is quadratic on a text
# of `[`.
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
# Matches `* item`, `  - item`; not `---`, `-5`, `* * *`.
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+(?=[^\s])(?![*\-_ \t]*$)", re.MULTILINE)
# Matches `*a*`, `**a b**`; not `* item * more` (space inside) nor over two lines. The back-reference closes with as
# many asterisks.
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?![\s*])[^*\n]*(?<![\s*])\1(?!\*)")
# "```json" and "```", in any case, as the original strips them.
_OPENING_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# Matches `WELL-KNOWN`, `DON'T`, `U.S`; possessive, so that a long run of letters is not matched in every way.
_HYPHENATED_WORD = re.compile(r"\w+(?:['\u2019.\-]\w+)*+")
# Arabic, Chinese and Japanese (full and half width) and small commas.
_COMMA = re.compile("[,\u060c\u3001\uff0c\uff64\ufe50]")

# `keywords:`, which words, and how often


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


# `length_constraints:`, how many words, sentences and paragraphs


@constraint("length_constraints:number_words")
def number_words(text: str, *, num_words: Count, relation: Relation) -> bool:
    r"""`less than` or `at least` so many words: runs of `\w`, as in the original ("don't" is two)."""
    return compared(sum(1 for _ in _WORD.finditer(text)), relation, num_words)


@constraint("length_constraints:number_sentences")
def number_sentences(text: str, *, num_sentences: Count, relation: Relation) -> bool:
    """`less than` or `at least` so many sentences; `sentences` says how they are cut, and how punkt differs."""
    return compared(len(sentences(text)), relation, num_sentences)


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


# `detectable_content:`, placeholders and a postscript


@constraint("detectable_content:number_placeholders")
def number_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """At least so many placeholders in square brackets, such as `[address]`.

    The original counts `[]` and `[ ]` too; here a placeholder names something, with a letter or digit.
    """
    named = sum(any(map(str.isalnum, match[0])) for match in _PLACEHOLDER.finditer(text))
    return named >= num_placeholders


@constraint("detectable_content:postscript")
def postscript(text: str, *, postscript_marker: Phrase) -> bool:
    """A postscript that starts with the marker, in any case; "P.S." may be "P. S.", and "P.P.S" "P. P. S.".

    The original takes the marker anywhere, inside a word and with nothing after it; here it starts a word, and a letter
    or digit follows it.
    """
    if postscript_marker.upper() == "P.P.S":
        # The patterns of the original (google-research/instruction_following_eval/instructions.py).
        marker = r"p\.\s?p\.\s?s"
    elif postscript_marker.upper() == "P.S.":
        marker = r"p\.\s?s\."
    else:
        marker = re.escape(postscript_marker)
    first = re.search(rf"(?<!\w){marker}", text, re.IGNORECASE)
    return first is not None and re.search(r"[^\W_]", text[first.end() :]) is not None


# `detectable_format:`, bullets, highlights, sections, title, JSON, one of three answers


@constraint("detectable_format:number_bullet_lists")
def number_bullet_lists(text: str, *, num_bullets: Count) -> bool:
    """Exactly so many bullet points: lines of `*` or `-`, space and content.

    The original needs no space and no content: it counts `---`, `-5` and `*emphasis* at a line's start` as bullets, and
    here they are none. Rules made of the marks alone (`* * *`) are none either.
    """
    return sum(1 for _ in _BULLET.finditer(text)) == num_bullets


@constraint("detectable_format:number_highlighted_sections")
def number_highlighted_sections(text: str, *, num_highlights: Count) -> bool:
    """At least so many highlights: `*text*`, `**text**` or `***text***` on one line, no space inside the asterisks.

    The original also takes "* item * more" for one, and counts `***text***` twice.
    """
    return sum(1 for _ in _HIGHLIGHT.finditer(text)) >= num_highlights


@constraint("detectable_format:multiple_sections")
def multiple_sections(text: str, *, section_spliter: Phrase, num_sections: Count) -> bool:
    """At least so many sections, each opened at the start of a line (Markdown marks aside) by the word and a number.

    The original takes a mention inside a sentence ("see Section 2") for a section, and needs no content; here some
    letter or digit stands in every section that counts. The spelling of the word is exact, as in the original.
    """
    # `## Section 2`, `**SECTION 1**` (the word as the task spells it); not `see Section 2`.
    mark = re.compile(rf"^[^\w\n]*{re.escape(section_spliter)}\s?\d+", re.MULTILINE)
    _, *sections = mark.split(text)
    return sum(any(map(str.isalnum, section)) for section in sections) >= num_sections


@constraint("detectable_format:title")
def title(text: str) -> bool:
    """Some line has a title in double angular brackets, `<<poem of joy>>`, with something inside."""
    for line in text.split("\n"):
        _, opened, rest = line.partition("<<")
        # The last `>>` of the line: `<<a>> and <<b>>` has one title or two, and counts.
        content, closed, _ = rest.rpartition(">>")
        if opened and closed and content.strip("<> \t"):
            return True
    return False


@constraint("detectable_format:json_format")
def json_format(text: str) -> bool:
    """The whole text is JSON, with or without Markdown ticks around it.

    The original takes a bare number or text for wrapped in JSON; here it is an object or a list, read strictly.
    """
    body = text.strip()
    if opening := _OPENING_FENCE.match(body):
        # The closing fence must be another one than the opening.
        if not body.endswith("```") or len(body) < opening.end() + 3:
            return False
        body = body[opening.end() : -3].strip()
    if not body.startswith(("{", "[")):
        return False
    try:
        read_json(body, max_length=len(body))
    except DocumentError:
        return False
    return True


@constraint("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    """The text has one of "My answer is yes.", "My answer is no.", "My answer is maybe.", and only one of them.

    The original is content when it has any: a text with all three follows it.
    """
    return sum(option in text for option in _OPTIONS) == 1


# `combination:`, two responses, and the prompt repeated before the answer


@constraint("combination:two_responses")
def two_responses(text: str) -> bool:
    """Two different responses, separated by `******`, which may also open or close the text.

    Different in their words: the original is content with a full stop more in the second.
    """
    responses = text.split("******")
    # Only the first and the last part may be empty: dividers that open or close the text.
    if not all(response.strip() for response in responses[1:-1]):
        return False
    words = [_WORD.findall(response.casefold()) for response in responses if response.strip()]
    return len(words) == 2 and words[0] != words[1] and all(words)


@constraint("combination:repeat_prompt")
def repeat_prompt(text: str, *, prompt_to_repeat: Phrase) -> bool:
    """The text begins with the request, in any case, and an answer follows; the original does not ask for the
    answer."""
    text = text.strip().lower()
    request = prompt_to_repeat.lower()
    return text.startswith(request) and _WORD.search(text, len(request)) is not None


# `startend:`, how the text begins and ends


@constraint("startend:end_checker")
def end_checker(text: str, *, end_phrase: Phrase) -> bool:
    """The text ends with the phrase, in any case; double quotes around the text do not count, as in the original."""
    return text.strip().strip('"').lower().endswith(end_phrase.lower())


@constraint("startend:quotation")
def quotation(text: str) -> bool:
    """The text is wrapped in double quotation marks, and they wrap something (the original lets `""` pass)."""
    text = text.strip()
    # Something other than quotes and space in between.
    return len(text) > 2 and text[0] == text[-1] == '"' and bool(text.strip('" \t\r\n'))


# `change_case:` and `punctuation:`, capitals, lower case, commas


@constraint("change_case:capital_word_frequency")
def capital_word_frequency(text: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """`less than` or `at least` so many words in capitals; hyphenated words are one, and "I" and "A" are words.

    The original's tokenizer (NLTK) cuts contractions: its "DON'T" is two, here one.
    """
    return compared(
        sum(match[0].isupper() for match in _HYPHENATED_WORD.finditer(text)), capital_relation, capital_frequency
    )


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
