"""The characters of a completion that each sampled token wrote, for colours.

The map is exact where the texts of the single tokens join to the text, as they do for nearly all; where they do not (a
character that several tokens share, a space that a tokenizer swallows), the next token that is found sets it right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# For characters that a tokenizer drops or that several tokens share. With a larger one, a short token could be found
# too far on, and shift the rest.
AHEAD = 8
"""Characters that a token may begin after the end of the one before it."""


def decoder_of(run: Path) -> Callable[[int], str] | None:
    """The text of a token id, by the tokenizer that the run saved with its newest checkpoint; None where there is
    none."""
    files = sorted(run.glob("checkpoints/step-*/model/tokenizer.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(files[-1]))
    except Exception:  # what a foreign tokenizer file raises is not documented; without it there are no colours
        return None
    texts: dict[int, str] = {}

    def decode(token: int) -> str:
        if token not in texts:
            texts[token] = tokenizer.decode([token], skip_special_tokens=True)
        return texts[token]

    return decode


def ends_of(text: str, ids: Sequence[int], decode: Callable[[int], str]) -> list[int]:
    """For each sampled token, the end of its characters in `text`: never falling, at most the length of the text."""
    ends: list[int] = []
    at = 0
    for token in ids:
        written = decode(token)
        # U+FFFD stands for a part of a character (an emoji of several tokens): such a token gets no characters of its
        # own, and the token that completes the character gets all of them.
        if written and "\ufffd" not in written:
            start = text.find(written, at, at + len(written) + AHEAD)
            at = start + len(written) if start >= 0 else at
        ends.append(at)
    return ends
