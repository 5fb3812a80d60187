"""Training and evaluation parts of a generated data set, separated by a hash of the task's text.

Invariant: the split of a task depends on its text alone, so the two never share a task, whatever is generated, in
whatever order. A digit of the question would not do: it would put a learnable difference between the splits.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from rlvr.errors import DataError, nearest

# A choice. It is a share of all questions, so that the number of tasks does not move the border.
EVAL_SHARE = 0.1
"""The share of the questions of the generated sources that are evaluated on."""


def in_split(key: str, split: Literal["train", "eval"], eval_share: float) -> bool:
    """Return True if the task whose text is `key` belongs to `split`; `eval_share` in [0, 1] of all texts are in
    `eval`.

    DataError for another split or a share out of range.
    """
    if split not in ("train", "eval"):
        raise DataError(f"there is no split {split!r}{nearest(split, ('train', 'eval'))}")
    if not 0 <= eval_share <= 1:
        raise DataError(f"eval_share={eval_share}: a share is between 0 and 1")
    # `surrogatepass`: a text may hold half of a surrogate pair, which UTF-8 refuses.
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    # The first 64 bits of the hash as a uniform number in [0, 2^64).
    held_out = int.from_bytes(digest[:8], "big") < eval_share * 2**64
    return held_out == (split == "eval")
