"""`detectable_content:`: placeholders and a postscript."""

from __future__ import annotations

import re

from rlvr.verifiers.instructions.instruction_registry import Count, Phrase, constraint

# Matches `[name]`; not `[a[b]` as a whole, nor one over several lines. The original's `\[.*?\]` is quadratic on a text
# of `[`.
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")


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
