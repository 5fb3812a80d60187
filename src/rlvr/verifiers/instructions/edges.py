"""`startend:`: how the text begins and ends."""

from __future__ import annotations

from rlvr.verifiers.instructions.instruction_registry import Phrase, constraint


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
