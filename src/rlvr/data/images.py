"""Rows with images, video or audio, which are refused: a policy that reads text only would train on prompts that miss
what they ask about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.errors import DataError

_COLUMNS_OF = {
    "images": "image images image_path image_paths image_url image_urls pixel_values",
    "videos": "video videos video_path video_url",
    "audio": "audio audios audio_path audio_url",
}
COLUMNS = {name: kind for kind, names in _COLUMNS_OF.items() for name in names.split()}
"""Columns that hold a row's media in data sets of multimodal models, and what they hold. A text there is a path or an
address."""
_PARTS_OF = {
    "images": "image image_url input_image",
    "videos": "video video_url input_video",
    "audio": "audio audio_url input_audio",
}
PARTS = {name: kind for kind, names in _PARTS_OF.items() for name in names.split()}
"""Types of the parts of a chat message that are no text, as transformers' templates and OpenAI's interfaces name
them."""
# Matches `<image>\nWhat is shown?`, `What is shown? <image>`; not `Explain <video> tags`, and not `<image>x</image>`,
# where an end tag follows.
_MARK = re.compile(r"^<(image|video|audio)>(?!.*</\1>)|(?<!\w)<(image|video|audio)>\Z", re.DOTALL | re.MULTILINE)
"""The place of a medium in the text of a prompt, as the data sets of LLaVA and verl write it: at the begin of a line or
at the end. In a sentence, or with an end tag, it is markup that a task asks about."""
_MARKED = {"image": "images", "video": "videos", "audio": "audio"}
# Matches `data:image/png;base64,...`, `https://host/a`, `frames/7.jpg`; not `A cat on a mat.`
_FILE = re.compile(r"^(data:|[a-z]+://)|\.\w{2,5}$", re.IGNORECASE)
"""A text that is a path or an address. In a column called `video`, say, other text is a description, which is kept."""


def refuse_images(columns: Mapping[str, Any], prompt: Any, place: str) -> None:
    """DataError that names the first image, video or sound of a row, in a column or in the prompt."""
    for name, value in columns.items():
        kind = (COLUMNS.get(name) if _is_there(value, name) else None) or _kind(value)
        if kind is not None:
            raise DataError(
                f"{place}: {_unsupported(kind)}, and the column {name!r} has one; where the prompts do not need it, "
                "leave the column out: data.fields={info: [the columns to keep]}"
            )
    if isinstance(prompt, str):
        _refuse_mark(prompt, "prompt", place)
        return
    for number, message in enumerate(prompt if isinstance(prompt, Sequence) else ()):
        if isinstance(message, Mapping):
            content = message.get("content")
        else:
            content = None
        where = f"prompt[{number}]"
        if isinstance(content, str):
            _refuse_mark(content, where, place)
        elif isinstance(content, Sequence):
            for part in content:
                if isinstance(part, Mapping) and (kind := PARTS.get(str(part.get("type")))) is not None:
                    raise DataError(f"{place}: {_unsupported(kind)}, and {where!r} has one")


def holds_media(parts: Sequence[Any]) -> bool:
    """Return True if some part of a message's content is an image, a video or a sound."""
    return any(isinstance(part, Mapping) and part.get("type") in PARTS for part in parts)


def _refuse_mark(text: str, where: str, place: str) -> None:
    if (mark := _MARK.search(text)) is not None:
        name = mark[1] or mark[2]
        raise DataError(f"{place}: {_unsupported(_MARKED[name])}, and {where!r} has a place for one: <{name}>")


def _unsupported(kind: str) -> str:
    if kind == "audio":
        return "audio is not supported yet"
    return f"{kind} are not supported yet"


def _is_there(value: Any, column: str) -> bool:
    """Tell a medium in a column of that name from null, an empty text, a number, a description, and a list of only
    these."""
    if isinstance(value, (list, tuple)):
        # A tensor as nested lists: numbers, which in any other column are no medium.
        numbers = column == "pixel_values" and len(value) > 0
        return numbers or any(_is_there(one, column) for one in value)
    if isinstance(value, str):
        # In `image` any text is taken for a path or base64, even without an ending.
        return bool(value) and (column in ("image", "images") or _FILE.search(value.strip()) is not None)
    return value is not None and not isinstance(value, (bool, int, float))


def _kind(value: Any) -> str | None:
    """The kind of media as `datasets` gives them, in whatever column: PIL's images, and mappings of a file; and lists
    of these."""
    if isinstance(value, (list, tuple)):
        return next((kind for one in value if (kind := _kind(one)) is not None), None)
    if isinstance(value, Mapping):
        if {"array", "sampling_rate"} <= set(value):
            return "audio"
        # What `datasets` gives for an Image or Audio column that is not decoded.
        is_file = set(value) == {"bytes", "path"} and any(one is not None for one in value.values())
        return "images" if is_file else None
    # By name: an image of PIL exists only where somebody else imported it.
    if type(value).__module__.partition(".")[0] == "PIL":
        return "images"
    return None
