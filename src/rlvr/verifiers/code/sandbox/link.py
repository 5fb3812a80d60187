"""The trainer's end of a socket pair, on an event loop: frames as in `inside.frames`, of a bounded size."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from rlvr.verifiers.code.sandbox.inside.frames import LENGTH

# Bytes read at a time. Arbitrary: between the loop's fairness and the number of system calls for a megabyte.
_CHUNK = 2**18


class Link:
    """Sends and receives; OSError or EOFError when the other end is gone or says more than it may."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._data = bytearray()

    async def send(self, *bodies: bytes) -> None:
        """Write frames."""
        message = b"".join(part for body in bodies for part in (LENGTH.pack(len(body)), body))
        await asyncio.get_running_loop().sock_sendall(self.sock, message)

    async def byte(self) -> bytes:
        """The next byte."""
        return await self._take(1)

    async def receive(self, most: int) -> bytes:
        """The next frame's body. The loop turns once for each, however many there are already."""
        if len(self._data) >= LENGTH.size:  # else reading turns it
            await asyncio.sleep(0)
        (length,) = LENGTH.unpack(await self._take(LENGTH.size))
        # Before anything is allocated: the length is a claim, too.
        if length > most:
            raise EOFError(f"{length} bytes are announced, over the limit of {most}")
        return await self._take(length)

    async def _take(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._data) < count:
            data = await loop.sock_recv(self.sock, _CHUNK)
            await asyncio.sleep(0)  # sock_recv gives way only where nothing is there to read
            if not data:
                raise EOFError("the other end is closed")
            self._data += data
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    def close(self) -> None:
        """Close this end; the other end then reads the end of the stream."""
        with contextlib.suppress(OSError):
            self.sock.close()
