"""Frames over a socket, blocking: a length of 4 bytes, big-endian, and a body."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct("!I")


def send(sock: socket.socket, body: bytes) -> None:
    """Write one frame."""
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """The next frame's body; None at the end of the stream."""
    head = _exactly(sock, LENGTH.size)
    return None if head is None else _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 2**18))
        if not part:
            return None
        data += part
    return bytes(data)
