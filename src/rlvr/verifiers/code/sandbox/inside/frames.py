"""Frames over a descriptor of a socket, blocking: a length of 4 bytes, big-endian, and a body.

Descriptors and not `socket.socket`: each object of Python's that a fork uses is a page that the kernel copies for it.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Any

LENGTH = struct.Struct("!I")
# Bytes asked for at a time: `os.read` allocates what it is asked for, and a forged length could ask for 4 GB.
_PART = 2**18
_DECODE = json.JSONDecoder().raw_decode


def send(fd: int, body: bytes) -> None:
    """Write one frame."""
    unwritten = LENGTH.pack(len(body)) + body
    # A write to a socket may take a part only.
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


def receive(fd: int) -> bytes | None:
    """The next frame's body; None at the end of the stream."""
    head = _exactly(fd, LENGTH.size)
    if head is None:
        return None
    return _exactly(fd, LENGTH.unpack(head)[0])


def _exactly(fd: int, count: int) -> bytes | None:
    data = os.read(fd, min(count, _PART))
    # The usual case of small frames, without a second buffer.
    if len(data) == count:
        return data
    parts = bytearray(data)
    while data and len(parts) < count:
        data = os.read(fd, min(count - len(parts), _PART))
        parts += data
    return bytes(parts) if len(parts) == count else None


def decoded(body: bytes) -> Any:
    """Return the value of a JSON text from the trainer; `json.loads` would first look for other encodings and for
    spaces around it."""
    return _DECODE(body.decode())[0]
