"""`detectable_format:`: bullets, highlights, sections, title, JSON, one of three answers."""

from __future__ import annotations

import re

from rlvr.verifiers.documents import DocumentError, read_json
from rlvr.verifiers.instructions.instruction_registry import Count, Phrase, constraint

# Matches `* item`, `  - item`; not `---`, `-5`, `* * *`.
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+(?=[^\s])(?![*\-_ \t]*$)", re.MULTILINE)
# Matches `*a*`, `**a b**`; not `* item * more` (space inside) nor over two lines. The back-reference closes with as
# many asterisks.
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,3})(?![\s*])[^*\n]*(?<![\s*])\1(?!\*)")
# "```json" and "```", in any case, as the original strips them.
_OPENING_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


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
