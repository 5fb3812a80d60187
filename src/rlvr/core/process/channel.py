"""One end of a `multiprocessing` Connection over a socket, with a thread that reads and one that writes.

Invariants: `send` never waits for the other end, so that a deadline passes while that end reads nothing; the reading
thread never ends without `ended`, whatever comes; `close` wakes both threads, and the other end sees the end at once.
"""

from __future__ import annotations

import contextlib
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
    where the connection was closed, else what was raised by a message that could not be unpickled or taken. The channel
    owns the connection. Whoever waits for a reply learns of the end by `ended`: what is sent afterwards is dropped.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        receive: Callable[[Any], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._connection = connection
        self._receive = receive
        self._ended = ended
        # Not bounded while the other end lives: what callers ask for, and that they gave up a request.
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._over = False
        """True from the end of the connection on."""
        # Held while the descriptor is shut down or closed, so that its number is not that of another file by then.
        self._lock = threading.Lock()
        self._writer = threading.Thread(target=self._write, name=f"{name}-send", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def send(self, message: Any) -> None:
        """Queue a message. Pickled here: whatever pickling raises is raised for its sender alone."""
        body = bytes(ForkingPickler.dumps(message))
        if not self._over:
            self._unsent.put(body)

    def close(self, flush: float = 0.0) -> None:
        """End the connection, from any thread but the channel's own. Closing twice is fine.

        What was sent before is written for at most `flush` seconds; what is left then is dropped.
        """
        if flush > 0:
            self._unsent.put(None)
            self._writer.join(flush)
        self._shut_down()

    def _shut_down(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._connection.closed:
                # `shutdown` and not `close`: the threads are inside system calls on the descriptor, which `close` does
                # not wake, and the connection lives as long as one of these lasts.
                # A socket object without a descriptor of its own, since there may be none left.
                line = socket.socket(fileno=self._connection.fileno())
                try:
                    line.shutdown(socket.SHUT_RDWR)
                finally:
                    line.detach()

    def _read(self) -> None:
        cause: BaseException | None = None
        try:
            while (body := self._next()) is not None:
                self._receive(ForkingPickler.loads(body))
        except BaseException as error:  # SystemExit too: whoever waits has to learn of the end
            cause = error
        self._over = True
        self._shut_down()
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
