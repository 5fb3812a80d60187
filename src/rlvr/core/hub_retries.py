"""Requests to the Hugging Face hub without a line for each retry."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# huggingface_hub 2.4.0, utils/_http.py, http_backoff: two lines for each of five retries.
_CLIENT = "huggingface_hub.utils._http"
_RETRIES = (" thrown while requesting ", "Retrying in ")


@contextlib.contextmanager
def without_retry_lines() -> Iterator[None]:
    """Drop the lines in which the hub's client says that a request failed and is tried again.

    The error of the last try has the cause, and the caller says it. That it waits for the hub's rate limit is still
    logged: such a wait takes minutes.
    """
    logger = logging.getLogger(_CLIENT)
    logger.addFilter(_is_shown)
    try:
        yield
    finally:
        logger.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not any(part in text for part in _RETRIES)
