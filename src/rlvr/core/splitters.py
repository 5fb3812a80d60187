"""Parts of a text or of a rollout: steps, lines, sentences, turns. Everything that cuts responses cuts them here.

Invariants: parts are in order, do not overlap, and hold a character that is no space; what stands between two parts
belongs to neither; time is linear in the text, but for a regular expression of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.core.sentences import sentences
from rlvr.records import Rollout

Span = tuple[int, int]
"""(first, past the end) of characters or tokens."""
BORDERS = {"blank_line": r"\n[ \t]*\n\s*", "line": r"\n\s*"}
"""Name -> what stands between two parts."""
NAMES = (*BORDERS, "sentence", "turn")

Split = str | tuple[str, ...]
"""The type of an option that says how to cut: a name of `NAMES`, a regular expression that matches what stands between
two parts, or a list of texts with each of which a part begins (`["Step ", "Wait"]`)."""


@dataclass(frozen=True)
class Splitter:
    """Cuts by `split`. ValueError for a pattern that is none, and for markers without a character."""

    split: Split = "blank_line"
    most: int | None = None
    """Most parts; further ones belong to the last."""

    def __post_init__(self) -> None:
        if isinstance(self.split, tuple) and not (self.split and all(self.split)):
            raise ValueError(f"split={list(self.split)!r} has to list the texts with which parts begin, none empty")
        try:
            re.compile(self._pattern)
        except re.error as error:
            raise ValueError(
                f"split={self.split!r} is neither {', '.join(NAMES)} nor a pattern: {error}; a list of texts cuts "
                "before each of them"
            ) from error

    def of_text(self, text: str) -> list[Span]:
        """(first character, past-the-end character) of each part. ValueError for `turn`, which a text does not show."""
        if self.split == "turn":
            raise ValueError("split=turn needs the turns of a rollout, and there is only a text")
        if self.split == "sentence":
            pieces = sentences(text)
        else:
            # A border of no characters would stand between any two of them; a marker is a border without any.
            found = [(match.start(), match.end()) for match in re.finditer(self._pattern, text)]
            borders = [(a, b) for a, b in found if b > a or isinstance(self.split, tuple)]
            starts = [0, *(end for _, end in borders)]
            ends = [*(start for start, _ in borders), len(text)]
            pieces = list(zip(starts, ends, strict=True))
        return self._joined([_stripped(text, *piece) for piece in pieces if text[slice(*piece)].strip()])

    def texts(self, text: str) -> list[str]:
        """The parts of a text."""
        return [text[start:end] for start, end in self.of_text(text)]

    def of_rollout(self, rollout: Rollout) -> list[Span]:
        """(first token, past-the-end token) of each part of what the policy wrote. Reads `Rollout.char_ends`, but for
        `turn`."""
        if self.split == "turn":
            return self._joined([(turn.start, turn.end) for turn in rollout.turns if turn.end > turn.start])
        return tokens_of(rollout, self.of_text(rollout.text))

    def _joined(self, parts: list[Span]) -> list[Span]:
        if self.most is not None and len(parts) > self.most:
            return [*parts[: self.most - 1], (parts[self.most - 1][0], parts[-1][1])]
        return parts

    @property
    def _pattern(self) -> str:
        if isinstance(self.split, tuple):
            return f"(?={'|'.join(map(re.escape, self.split))})"
        return BORDERS.get(self.split, self.split)


def _stripped(text: str, start: int, end: int) -> Span:
    """The part without the space at its ends."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), end - (len(part) - len(part.rstrip()))


def tokens_of(rollout: Rollout, spans: Sequence[Span]) -> list[Span]:
    """The tokens of spans of characters of a rollout's text: from the one that holds a span's first character to the
    one that completes its last. Where nothing says which (`Rollout.char_ends` is None), all that the policy wrote."""
    written = rollout.sampled.nonzero()[0]
    if not len(written):
        # As a span that nothing can train: the last token of the prompt.
        return [(len(rollout) - 1, len(rollout))] * len(spans)
    if rollout.char_ends is None:
        return [(int(written[0]), int(written[-1]) + 1)] * len(spans)
    # [written]: where each sampled token ends in the text.
    ends = rollout.char_ends[written]
    starts = ends.searchsorted([start for start, _ in spans], "right")
    first = written[np.minimum(starts, len(written) - 1)]
    last = written[np.minimum(ends.searchsorted([end for _, end in spans]), len(written) - 1)]
    return list(zip(first.tolist(), (np.maximum(first, last) + 1).tolist(), strict=True))
