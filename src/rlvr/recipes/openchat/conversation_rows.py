"""data/openchat.jsonl: conversations of two sources, each with the prefix of its source.

Conversations in the form of github imoneoi/openchat, commit 47a3596, README.md: one in a line, `{"items": [{"role",
"content", "weight"}], "condition": "GPT4", "system": ""}`. Prefixes and ends of turns are those of its v3.2
(ochat/config/__init__.py, conversation_template.py). A response is weighted by its source: the recipe's
`source_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlvr.config import Config
from rlvr.data.files import Placed, read_rows
from rlvr.errors import DataError
from rlvr.recipes.prepare import column

FILE = Path("data/openchat/train.jsonl")
SOURCES = {"GPT4": "expert", "GPT3": "other"}
"""Condition of a conversation -> source in the recipe."""
END = "<|end_of_turn|>"


def rows(config: Config) -> Iterator[Placed]:
    """Yield a row for each response of each conversation, with all turns before it in the prompt."""
    if not FILE.exists():
        raise DataError(
            f"{FILE} is not there: write the conversations of openchat/openchat_sharegpt4_dataset to it, one a line, "
            'such as {"items": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], '
            '"condition": "GPT4", "system": ""}'
        )
    for place, row in read_rows(FILE):
        condition = column(row, "condition", place)
        if condition not in SOURCES:
            raise DataError(f"{place}: condition {condition!r} is none of {', '.join(SOURCES)}")
        text = row.get("system", "")
        if text:
            text += END
        for item in column(row, "items", place):
            prefix = f"{condition} {item['role'].title()}:"
            if item["role"] == "assistant":
                response = f" {item['content']}"
                yield place, {"prompt": text + prefix, "source": SOURCES[condition], "demonstration": response}
            text += f"{prefix} {item['content']}{END}"
