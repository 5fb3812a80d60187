"""`combination:`: two responses, and the prompt repeated before the answer."""

from __future__ import annotations

import re

from rlvr.verifiers.instructions.instruction_registry import Phrase, constraint

_WORD = re.compile(r"\w+")


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
