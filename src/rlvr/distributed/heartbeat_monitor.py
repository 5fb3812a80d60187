"""A watchdog beside the main thread: it names a rank that is lost, also while the main thread is inside a collective.

A collective of torch or DeepSpeed cannot be interrupted, and waits half an hour for a rank that is stopped. So a thread
gives this rank's heartbeat and reads those of the others, and another counts how long each has been silent. Where one
is lost, named waits of the main thread raise that at once; a main thread that has not noticed after MARGIN seconds
cannot, and the process is ended, with the reason on standard error and in the log. What is on disk stays as it is. To
raise is not to notice: code in between may take the error for one of its own, so that the main thread has MARGIN again
to reach `notice`.

Silence is counted in the watchdog's own ticks: a process that was itself stopped, or short of processor time, blames
no rank. Limit: both threads need Python's interpreter. A rank whose main thread holds it for longer than the heartbeat
timeout, in one call of an extension that does not release it, counts as silent, as at a meeting. torch, DeepSpeed,
safetensors and hashing release it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from rlvr.core.waits import Wait, stacks
from rlvr.errors import LostRankError, tell_launcher

log = logging.getLogger(__name__)

# Arbitrary: small beside the timeout of 30 s, and a few requests a second are no load for the store.
HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a rank."""
MARGIN = 10.0
"""Seconds that the main thread has to end by itself: gloo raises at once where a rank's process is gone, naming takes
three beats."""
LOG_SECONDS = 5.0
"""Seconds for the last words in the launcher's file and the log, which may be on storage that went with the other
rank."""


def heartbeat_key(rank: int) -> str:
    """Return the key of a rank's heartbeat in the store."""
    return f"beat/{rank}"


def failure_key(rank: int) -> str:
    """Return the key in the store under which a rank reports its failure."""
    return f"failed/{rank}"


class HeartbeatMonitor:
    """Watches the other ranks from the first heartbeat on, until `close`. `place()` says where the main thread is."""

    def __init__(self, rank: int, size: int, store: Any, heartbeat_timeout: float, place: Callable[[], str]) -> None:
        self.rank = rank
        self.heartbeat_timeout = heartbeat_timeout
        self.place = place
        self._others = [other for other in range(size) if other != rank]
        self._store = store
        self._heard: dict[int, bytes] = {}
        """The newest heartbeat of each rank that gave one."""
        self._failures: dict[int, str] = {}
        self._rounds = 0
        """Heartbeats given and read; it stands still where the store does not answer."""
        self._trouble: LostRankError | None = None
        self._raised = False
        """Set when the main thread was given the trouble as an exception."""
        self._noticed = threading.Event()
        """Set when the main thread knows of a lost rank, and when the watchdog is closed."""
        # From the constructor, so that a rank is known to have begun before its first meeting.
        self._beat(0)
        self._beating = threading.Thread(target=self._give_and_read, name="rlvr-heartbeat", daemon=True)
        self._beating.start()
        threading.Thread(target=self._watch, name="rlvr-watchdog", daemon=True).start()
        # Every named wait of the process calls it ten times a second or so (core/waits.py).
        Wait.alarms.append(self._raise_once)

    def notice(self) -> None:
        """The main thread ends by itself: stop watching, but give heartbeats until `close`."""
        self._noticed.set()

    def close(self) -> None:
        """Stop. No heartbeat comes after this has returned, unless the store is stuck."""
        self._noticed.set()
        self._closed = True
        with contextlib.suppress(ValueError):
            Wait.alarms.remove(self._raise_once)
        # A beat after `close` would write a key that `World._clear_store` has deleted. Bounded, since the store may be
        # stuck.
        self._beating.join(3 * HEARTBEAT_SECONDS)

    _closed = False

    def _raise_once(self) -> None:
        """Raise the error about lost ranks in the main thread, once: the wait under way there cannot end well. Later
        waits go on, such as that for a checkpoint which is being written."""
        if self._trouble is None or self._raised or self._noticed.is_set():
            return
        # Other threads wait too (the checkpoint's writer, say): an error raised there would end nothing.
        if threading.current_thread() is threading.main_thread():
            self._raised = True
            raise self._trouble

    # the heartbeat's thread, which the store may hold up

    def _give_and_read(self) -> None:
        pause = threading.Event()
        while not self._closed:
            try:
                self._beat(self._rounds)
                for rank in self._others:
                    # `get` of a key that is not there would block until torch's timeout.
                    if self._store.check([heartbeat_key(rank)]):
                        self._heard[rank] = self._store.get(heartbeat_key(rank))
                    if self._store.check([failure_key(rank)]):
                        self._failures[rank] = self._store.get(failure_key(rank)).decode()
            except Exception:  # the store is gone with rank 0 or its launcher: no round is counted any more
                return
            self._rounds += 1
            pause.wait(HEARTBEAT_SECONDS)

    def _beat(self, number: int) -> None:
        self._store.set(heartbeat_key(self.rank), str(number))

    # the watching thread, which nothing holds up

    def _watch(self) -> None:
        silent = dict.fromkeys(self._others, 0.0)
        last: dict[int, bytes] = {}
        rounds = 0
        stuck = 0.0
        # Ticks, not the clock: where this process was stopped for a minute, it has made one tick and blames no rank.
        while not self._noticed.wait(HEARTBEAT_SECONDS):
            # No round since the last tick: the store did not answer, so nothing is known of any rank.
            if self._rounds == rounds:
                stuck = stuck + HEARTBEAT_SECONDS
            else:
                stuck = 0.0
            rounds = self._rounds
            for rank, beat in list(self._heard.items()):
                # The content of a heartbeat is a counter; only that it changes says something, so clocks of machines
                # need not agree.
                silent[rank] = silent[rank] + HEARTBEAT_SECONDS if last.get(rank) == beat else 0.0
                last[rank] = beat
            self._trouble = self._lost(silent, stuck)
            if self._trouble is not None and self._ends_alone(silent, stuck):
                return

    def _lost(self, silent: dict[int, float], stuck: float) -> LostRankError | None:
        """Return the error about ranks that failed or are silent; None where there are none."""
        where = f"while rank {self.rank} was at {self.place()} or in what follows it"
        # What a rank said itself is better than its silence, and the lowest rank's is reported by all alike.
        for rank, text in sorted(self._failures.items()):
            return LostRankError(f"rank {rank} failed {where}: {text}")
        # Before the ranks: without the store all of them look silent.
        if stuck > self.heartbeat_timeout:
            if self.rank == 0:
                keeper = "the launcher"
            else:
                keeper = "rank 0 or the launcher"
            who = f"{keeper}, which keeps the ranks' store,"
            seconds = stuck
        else:
            gone = [rank for rank in self._others if silent[rank] > self.heartbeat_timeout]
            if not gone:
                return None
            who = " and ".join(f"rank {rank}" for rank in gone)
            seconds = max(silent[rank] for rank in gone)
        return LostRankError(
            f"{who} has shown no sign of life for {seconds:.0f} s, {where}: its process was killed or stopped, or its "
            "machine is gone; go on with --resume auto"
        )

    def _ends_alone(self, silent: dict[int, float], stuck: float) -> bool:
        """Return True if the main thread notices the error, and so ends the process by itself; False where the lost
        rank came back. Where neither happens within the margin, end the process."""
        before = dict(self._heard), self._rounds
        # The main thread gets MARGIN from the lost rank, and MARGIN once more from where the error was raised in it:
        # cleaning up (closing an engine, say) takes time.
        raised = self._raised
        left = MARGIN
        while left > 0:
            if self._noticed.wait(HEARTBEAT_SECONDS):
                return True
            left -= HEARTBEAT_SECONDS
            if self._raised:
                if not raised:
                    raised = True
                    left = MARGIN
            # Not once the error was raised: the main thread is on its way out then. A rank that failed does not come
            # back.
            elif not self._failures and self._came_back(silent, stuck, *before):
                self._trouble = None
                return False
        self._end()
        return True

    def _came_back(self, silent: dict[int, float], stuck: float, heard: dict[int, bytes], rounds: int) -> bool:
        """Return True if those who were silent have given a sign of life since."""
        if stuck > self.heartbeat_timeout:
            return self._rounds != rounds
        return all(
            self._heard[rank] != heard[rank] for rank, seconds in silent.items() if seconds > self.heartbeat_timeout
        )

    def _end(self) -> None:
        """End this process, whose main thread cannot."""
        text = str(self._trouble)
        with contextlib.suppress(OSError):
            # The descriptor and not sys.stderr, whose lock the stuck main thread may hold.
            os.write(2, f"error: {text}\n".encode())
        # In a thread with a bound: the files may be on storage that went with the other machine.
        words = threading.Thread(target=_last_words, args=(text,), daemon=True)
        words.start()
        words.join(LOG_SECONDS)
        # sys.exit would end this thread only, and a normal exit would wait for the main thread, which is inside the
        # collective.
        os._exit(1)


def _last_words(text: str) -> None:
    """Say why the process ends where the launcher and the user look, in files that may be on storage that is gone."""
    tell_launcher(text)
    log.error("%s; the stacks of all threads:\n%s", text, stacks())
