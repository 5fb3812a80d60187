"""Wall-clock time of a step by phase.

Invariants:
- Time is counted in one phase at a time: a phase entered inside another pauses the outer one, so the phases never sum
  to more than the step, and what is in none of them is `time/unaccounted`.
- For one thread, the loop's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from rlvr.errors import nearest

KNOWN = ("rollout", "verify", "score", "update", "publish")


class Meter(Protocol):
    """A quantity other than time that is counted by phase (GPU memory, idle time)."""

    def start(self) -> None:
        """Begin a step."""
        ...

    def settle(self, phase: str | None) -> None:
        """Add what accrued since the last call to `phase`; None: to no phase."""
        ...


class Phases:
    """A stopwatch by phase: `with phases("rollout"): ...` any number of times, then `finish()` once per step.

    `mark` is entered round each phase with its name: torch's `record_function` shows it in a trace. `meters` are
    settled whenever the phase changes; what they counted is read from them after `finish`, before the next step starts.
    """

    def __init__(
        self, mark: Callable[[str], AbstractContextManager[Any]] = nullcontext, meters: Sequence[Meter] = ()
    ) -> None:
        self._mark_phase = mark
        self._meters = meters
        self._open: list[str] = []
        self.start()

    def start(self) -> None:
        """Begin a step now; time before this call (an evaluation, a checkpoint) is not part of it."""
        self._seconds = dict.fromkeys(KNOWN, 0.0)
        self._began = self._mark = time.perf_counter()
        for meter in self._meters:
            meter.start()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's time as phase `name`; KeyError when there is no such phase."""
        if name not in KNOWN:
            raise KeyError(f"there is no phase {name!r}{nearest(name, KNOWN)}")
        # Before the phase is opened: the time so far is the outer phase's, or none's.
        self._settle()
        self._open.append(name)
        try:
            with self._mark_phase(f"phase/{name}"):
                yield
        finally:
            self._settle()
            self._open.pop()

    @property
    def current(self) -> str | None:
        """The innermost open phase."""
        return self._open[-1] if self._open else None

    def _settle(self) -> None:
        """Give the time since the last change to the innermost open phase."""
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now
        for meter in self._meters:
            meter.settle(self.current)

    def finish(self) -> dict[str, float]:
        """`time/<phase>`, `time/step` and `time/unaccounted` in seconds since the step began."""
        self._settle()
        total = self._mark - self._began
        spent = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        # `time/step` is the sum of all phases and of this. Rounding alone could make it negative.
        rest = max(0.0, total - sum(spent.values()))
        return {**spent, "time/step": total, "time/unaccounted": rest}
