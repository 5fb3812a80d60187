"""The map from the characters of a rollout's text to its tokens, made where scores of spans are to reach tokens."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr.records import Rollout

WINDOW = 8
"""Tokens decoded together before a token's text is taken for final: characters of several tokens end within it."""


def char_ends(tokenizer: Any, rollout: Rollout) -> np.ndarray:
    """int64 [T]: where in `rollout.text` each sampled token ends, -1 for tokens that the policy did not write.

    A token that completes no character ends where the one before it does. The texts of several turns are joined by a
    newline each, as in `Context.rollout`. Linear in the number of tokens.
    """
    result = np.full(len(rollout), -1, dtype=np.int64)
    at = 0
    for run in _runs(np.flatnonzero(rollout.sampled)):
        lengths = _lengths(tokenizer, rollout.token_ids[run].tolist())
        result[run] = at + np.asarray(lengths)
        at += lengths[-1] + 1
    return result


def _runs(places: np.ndarray) -> list[np.ndarray]:
    """Neighbouring positions together."""
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    return [run for run in np.split(places, cuts) if len(run)]


_pieces: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def _piece(tokenizer: Any, token: int) -> str:
    """The text of a token by itself, decoded once for each tokenizer."""
    known = _pieces.setdefault(tokenizer, {})
    if token not in known:
        known[token] = tokenizer.decode([token], skip_special_tokens=True)
    return known[token]


def _lengths(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Characters of the decoded text up to and with each token."""
    pieces = [_piece(tokenizer, token) for token in ids]
    if "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True) and not any("\ufffd" in p for p in pieces):
        return list(
            itertools.accumulate(map(len, pieces))
        )  # no character of several tokens, no token that its place changes
    lengths: list[int] = []
    base = 0
    start = 0  # characters before token `start`
    for t in range(len(ids)):
        text = tokenizer.decode(ids[start : t + 1], skip_special_tokens=True)
        whole = len(text) - len(text.rstrip("\ufffd")) == 0
        lengths.append(base + len(text) if whole else (lengths[-1] if lengths else 0))
        if whole and t + 1 - start > WINDOW:
            # go on from the middle, so that a tokenizer that treats a text's first token apart is not asked for it
            kept = start + WINDOW // 2
            base += len(text) - len(tokenizer.decode(ids[kept : t + 1], skip_special_tokens=True))
            start = kept
    return lengths
