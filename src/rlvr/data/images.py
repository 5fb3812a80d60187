"""Rows with images, which are refused: a policy that reads text only would train on prompts that miss what they ask about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.errors import DataError

COLUMNS = ("image", "images")
"""Columns that hold a row's images in data sets of vision-language models."""
PARTS = ("image", "image_url", "input_image")
"""Types of the parts of a chat message that are images, as transformers' templates and OpenAI's interfaces name them."""


def refuse_images(columns: Mapping[str, Any], prompt: Any, place: str) -> None:
    """DataError that names the first image of a row, in a column or in the prompt's chat messages."""
    for name, value in columns.items():
        if (name in COLUMNS and _is_there(value)) or _is_image(value):
            raise DataError(
                f"{place}: images are not supported yet, and the column {name!r} has one; where the prompts do not need it, "
                "leave the column out: data.fields={info: [the columns to keep]}"
            )
    messages = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, str) else ()
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        if any(isinstance(part, Mapping) and part.get("type") in PARTS for part in parts):
            raise DataError(f"{place}: images are not supported yet, and 'prompt[{number}]' has one")


def _is_there(value: Any) -> bool:
    """Tell a value from null, an empty text, and a list of only these."""
    if isinstance(value, (list, tuple)):
        return any(_is_there(one) for one in value)
    return value is not None and value != ""


def _is_image(value: Any) -> bool:
    """Tell images as `datasets` gives them: PIL's objects, mappings with the bytes of a file, and lists of these."""
    if isinstance(value, (list, tuple)):
        return any(_is_image(one) for one in value)
    if isinstance(value, Mapping):
        return set(value) == {"bytes", "path"} and isinstance(value["bytes"], bytes)
    return type(value).__module__.partition(".")[0] == "PIL"
