"""The map from the characters of a rollout's text to its tokens, made where scores of spans are to reach tokens."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr.records import Rollout

# A character has at most 4 bytes in UTF-8 and a byte-level token at least one, so 4 tokens would do; twice that is
# arbitrary and costs only longer decodings.
WINDOW = 8
"""Tokens decoded together before a token's text is taken for final: characters of several tokens end within it."""


def char_ends(tokenizer: Any, rollout: Rollout) -> np.ndarray:
    """int64 [T]: where in `rollout.text` each sampled token ends, -1 for tokens that the policy did not write.

    A token that completes no character ends where the one before it does. The texts of several turns are joined by a
    newline each, as in `RolloutTokens.rollout`. Linear in the number of tokens.
    """
    # [T]
    result = np.full(len(rollout), -1, dtype=np.int64)
    at = 0
    for run in _runs(np.flatnonzero(rollout.sampled)):
        lengths = _lengths(tokenizer, rollout.token_ids[run].tolist())
        result[run] = at + np.asarray(lengths)
        # + 1 for the newline that joins turns in `RolloutTokens.rollout`.
        at += lengths[-1] + 1
    return result


def _runs(places: np.ndarray) -> list[np.ndarray]:
    """Neighbouring positions together."""
    # A gap in the positions of sampled tokens is a reply or a prompt between two turns.
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    return [run for run in np.split(places, cuts) if len(run)]


# At most one text for each vocabulary entry; weak, so that it goes with the tokenizer.
_token_texts: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def _token_text(tokenizer: Any, token: int) -> str:
    """The text of a token by itself, decoded once for each tokenizer."""
    texts = _token_texts.setdefault(tokenizer, {})
    if token not in texts:
        texts[token] = tokenizer.decode([token], skip_special_tokens=True)
    return texts[token]


def _lengths(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Characters of the decoded text up to and with each token."""
    # The quick way holds where decoding is a concatenation. It is not for a character whose bytes are spread over
    # tokens (each decodes to U+FFFD by itself), nor for SentencePiece's first token, which loses its space.
    texts = [_token_text(tokenizer, token) for token in ids]
    joined = "".join(texts)
    if joined == tokenizer.decode(ids, skip_special_tokens=True) and "\ufffd" not in joined:
        return list(itertools.accumulate(map(len, texts)))
    lengths: list[int] = []
    # The slow way. start: the first token that is decoded together with token t. base: characters before it.
    base = 0
    start = 0
    for t in range(len(ids)):
        text = tokenizer.decode(ids[start : t + 1], skip_special_tokens=True)
        # A trailing U+FFFD is an incomplete character: the token ends where the one before it does, until the next
        # completes it.
        whole = len(text) - len(text.rstrip("\ufffd")) == 0
        lengths.append(base + len(text) if whole else (lengths[-1] if lengths else 0))
        # Moving the window keeps it linear: without it each token would decode all that is before it.
        if whole and t + 1 - start > WINDOW:
            # go on from the middle, so that a tokenizer that treats a text's first token apart is not asked for it
            kept = start + WINDOW // 2
            base += len(text) - len(tokenizer.decode(ids[kept : t + 1], skip_special_tokens=True))
            start = kept
    return lengths
