"""A tokenizer of one's own, for code that runs beside other threads."""

from __future__ import annotations

import copy
import threading
from typing import Any


class TokenizerCopy:
    """A copy of a tokenizer, used by one thread at a time: `with copied as tokenizer: tokenizer(text)`.

    A Hugging Face tokenizer writes arguments of a call (`split_special_tokens`, padding, truncation) into the one
    object behind it, where a call of another thread reads them. The copy is never the caller's object, so that neither
    what is done here nor what is done elsewhere with the original changes the other's token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        # Deep, since the object of the `tokenizers` package behind it is what the calls write to.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()

    def __enter__(self) -> Any:
        self._lock.acquire()
        return self._tokenizer

    def __exit__(self, *_: object) -> None:
        self._lock.release()
