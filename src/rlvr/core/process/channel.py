"""One end of a `multiprocessing` Connection over a socket, with a thread that reads and one that writes.

Invariants: `send` never waits for the other end, so that a deadline passes while that end reads nothing; the reading
thread never ends without `ended`, whatever comes; `close` wakes both threads, and the other end sees the end at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Channel:
    """Messages to and from another process of the library.

    `receive(message)` and at the end `ended(cause)` are called on the reading thread, called `name`. The cause is None
    where the connection was closed, else the error of a message that could not be unpickled or taken. The channel owns
    the connection. Whoever waits for a reply learns of the end by `ended`: what is sent afterwards is dropped.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        receive: Callable[[Any], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._connection = connection
        self._receive = receive
        self._ended = ended
        # Not bounded: at most what callers wait for, and they give up at their deadlines.
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Held while the descriptor is shut down or closed, so that its number is not that of another file by then.
        self._lock = threading.Lock()
        self._writer = threading.Thread(target=self._write, name=f"{name}-send", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message. Pickled here: whatever pickling raises is raised for its sender alone."""
        self._unsent.put(bytes(ForkingPickler.dumps(message)))

    def close(self) -> None:
        """End the connection, from any thread. Closing twice is fine."""
        with self._lock, contextlib.suppress(OSError):
            if not self._connection.closed:
                # `shutdown` and not `close`: the threads are inside system calls on the descriptor, which `close` does
                # not wake, and the connection lives as long as one of these lasts.
                with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        cause: Exception | None = None
        try:
            while (body := self._next()) is not None:
                self._receive(ForkingPickler.loads(body))
        except Exception as error:
            cause = error
        self.close()
        self._unsent.put(None)
        try:
            self._ended(cause)
        finally:
            self._writer.join()
            with self._lock:
                self._connection.close()

    def _next(self) -> bytes | None:
        """The next message; None at the end of the connection."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def _write(self) -> None:
        # The other end is gone: the reading thread sees that, too.
        with contextlib.suppress(OSError):
            while (body := self._unsent.get()) is not None:
                self._connection.send_bytes(body)
