"""Frames over a socket: a length of 4 bytes, big-endian, and a body. Blocking, or on an event loop.

Programs in a sandbox use the same frames by code of their own (`rlvr.verifiers.code.sandbox.inside.frames`): they read
nothing of the library but what is mounted there, and descriptors in the place of socket objects.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

LENGTH = struct.Struct("!I")
# Bytes read at a time. Arbitrary: between the loop's fairness and the number of system calls for a megabyte.
_CHUNK = 2**18


def send(sock: socket.socket, body: bytes) -> None:
    """Write one frame, at once, so that a reader wakes once."""
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """The next frame's body; None at the end of the stream."""
    head = _exactly(sock, LENGTH.size)
    if head is None:
        return None
    return _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = sock.recv(min(count - len(data), _CHUNK))
        # The other end was killed with data unread: an end like any other.
        except ConnectionResetError:
            part = b""
        if not part:
            return None
        data += part
    return bytes(data)


def receive_fds(sock: socket.socket, size: int, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """A message of at most `size` bytes and the descriptors that came with it, at most `most`. No process that this one
    starts inherits them."""
    fds = array.array("i")
    # Not `socket.recv_fds`, which takes flags and does not pass them on (Lib/socket.py of CPython 3.11).
    data, parts, _, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, part in parts:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)


class Link:
    """One end of a socket pair, on an event loop. OSError or EOFError when the other end is gone or says more than it
    may.

    `process` is a pidfd of the process at the other end, which the link closes. With it the stream ends with that
    process, though one that it has forked keeps the socket open. What it had sent before is read first.
    """

    def __init__(self, sock: socket.socket, process: int | None = None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._data = bytearray()
        self._under_way = 0
        """Reads and writes that wait for the socket."""
        self._closed = False
        self._process = process
        if process is not None:
            self._loop = asyncio.get_running_loop()
            # A pidfd becomes readable when its process ends, as a zombie too.
            self._loop.add_reader(process, self._process_ended)

    @property
    def open(self) -> bool:
        """Return True if this end is open."""
        return not self._closed

    @property
    def has_unread(self) -> bool:
        """Return True if more was read from the socket than was asked for."""
        return bool(self._data)

    @property
    def quiet(self) -> bool:
        """Return True if the other end is open and has sent nothing unasked."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._data
        except OSError:
            pass
        return False

    async def send(self, *bodies: bytes) -> None:
        """Write frames."""
        message = b"".join(part for body in bodies for part in (LENGTH.pack(len(body)), body))
        with self._waiting():
            await asyncio.get_running_loop().sock_sendall(self.sock, message)

    async def receive(self, most: int) -> bytes:
        """The next frame's body, of at most `most` bytes. The loop turns once for each, however many there are
        already."""
        if len(self._data) >= LENGTH.size:  # else reading turns it
            await asyncio.sleep(0)
        (length,) = LENGTH.unpack(await self.take(LENGTH.size))
        # Before anything is allocated: the length is a claim, too.
        if length > most:
            raise EOFError(f"{length} bytes are announced, over the limit of {most}")
        return await self.take(length)

    async def take(self, count: int) -> bytes:
        """The next `count` bytes, outside of frames."""
        loop = asyncio.get_running_loop()
        while len(self._data) < count:
            # sock_recv gives way only where nothing is there to read. Before it and not after it: what was read is
            # handled in the same turn, and so before a deadline that passes meanwhile.
            await asyncio.sleep(0)
            with self._waiting():
                data = await loop.sock_recv(self.sock, _CHUNK)
            if not data:
                raise EOFError("the other end is closed")
            self._data += data
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    def _process_ended(self) -> None:
        self._forget_process()
        with contextlib.suppress(OSError):
            # The kernel hands out what has come, and then the end of the stream.
            self.sock.shutdown(socket.SHUT_RDWR)

    def _forget_process(self) -> None:
        if self._process is not None:
            self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if self._closed and not self._under_way:
                self.sock.close()

    def close(self) -> None:
        """Close this end, on its loop; the other end, and whoever reads here, then reads the end of the stream."""
        self._forget_process()
        self._closed = True
        with contextlib.suppress(OSError):
            if self._under_way:
                # A descriptor that is closed wakes nobody who waits for it: the last one that waits closes it.
                self.sock.shutdown(socket.SHUT_RDWR)
            else:
                self.sock.close()
