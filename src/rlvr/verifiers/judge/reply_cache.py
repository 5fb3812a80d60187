"""Replies of judges on disk, so that no request is paid for twice.

Invariants: an entry is whole or not there; one that cannot be read counts as not there, and a disk that is full or
read-only costs the cache and no verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ChatReply:
    """The reply of a chat endpoint."""

    text: str
    first_token: Mapping[str, float] = field(default_factory=dict)
    """Alternatives of the first token -> log-prob, where the request asks for them."""
    truncated: bool = False
    """It ended at the limit of tokens."""
    code: str = ""
    """The code of the request that it answers (rlvr.verifiers.judge.fenced_prompt)."""

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"first_token": dict(self.first_token)}


@dataclass(frozen=True)
class ReplyCache:
    """A folder with a file for each reply, which several runs may share."""

    folder: str

    @staticmethod
    def key(model: str, body: Mapping[str, Any], draw: int) -> str:
        """The name of the reply to a whole request: its model, messages and sampling, and the number of the draw."""
        text = json.dumps([model, body, draw], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> ChatReply | None:
        """The reply of that name, or None."""
        try:
            row = json.loads(self._path(key).read_bytes())
            tokens = {name: float(value) for name, value in row["first_token"].items()}
            return ChatReply(str(row["text"]), tokens, bool(row["truncated"]), str(row["code"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, key: str, reply: ChatReply) -> None:
        """Keep the reply."""
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(number, "w") as file:
                json.dump(reply.to_json(), file)
            # Whole or not at all, also where two runs write it.
            os.replace(name, path)

    def _path(self, key: str) -> Path:
        # Two levels: a folder of a million files is slow to list.
        return Path(self.folder) / key[:2] / f"{key}.json"
