"""A cache of verdicts, by verifier, gold and extracted answer.

Invariant: only what the answer alone decides is kept, never a timeout, an error, an undecided verdict, or one that
points into its completion's text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.verifiers.base import Verifier

# Arbitrary. A long run grew by 1.4 kB of remembered verdicts a step (docs/log.md, 2026-11-22).
ENTRIES = 65_536

Key = tuple[int, Hashable]


class VerdictCache:
    """The most recently used verdicts, at most `entries` of them; safe to use from several threads."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self.entries = entries
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, tuple[Verifier, Verdict]] = OrderedDict()

    @staticmethod
    def key(verifier: Verifier, task: Task, completion: str) -> Key | None:
        """Return the key of a verdict; None if the verifier gives no key, raises, or gives one that cannot be
        hashed."""
        try:
            # By identity: two verifiers of one class may have other options.
            key = (id(verifier), verifier.cache_key(task, completion))
            hash(key)
        except Exception:  # the verifier's own code: its trouble costs the memory of this verdict only
            return None
        return None if key[1] is None else key

    def get(self, key: Key) -> Verdict | None:
        """Return the verdict of a key, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][1]

    def put(self, key: Key, verifier: Verifier, verdict: Verdict) -> None:
        """Store a verdict if the answer alone decides it. The verifier is stored with it, so that no other one gets its
        id."""
        # A timeout or an error may be the machine's, and would be repeated for ever.
        failed = verdict.status in (VerdictStatus.TIMEOUT, VerdictStatus.ERROR)
        if failed or not verdict.decided or verdict.spans:
            return
        with self._lock:
            self._kept[key] = verifier, verdict
            self._kept.move_to_end(key)
            while len(self._kept) > self.entries:
                self._kept.popitem(last=False)
