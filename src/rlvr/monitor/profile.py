"""A look into the time of single steps: torch's profiler, written into the run folder.

`profile/step-N.json` is a Chrome trace (open it in Perfetto) of all threads, the phases of the step among its events;
`profile/step-N.txt` has the seconds by phase and the operations that took longest. Other steps cost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
ROWS = 40
"""Operations in the table of those that took longest."""


class StepProfiler:
    """Profiles the steps numbered in `steps`; files go to `folder`/profile."""

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self.folder = folder / "profile"
        self.steps = frozenset(steps)

    @contextmanager
    def __call__(self, number: int, records: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Round step `number`, whose record is the last of `records` when the block ends."""
        if number not in self.steps:
            yield
            return
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the engine has its own thread
        with profile(activities=activities, experimental_config=everywhere) as profiler:
            yield
        try:
            self._write(profiler, number, records[-1])
        except (OSError, RuntimeError) as error:  # a full disk, which Python or torch's own writer finds
            log.warning("the profile of step %d could not be written to %s: %s", number, self.folder, error)

    def _write(self, profiler: Any, number: int, record: Mapping[str, Any]) -> None:
        import torch

        self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that was removed is not made again
        profiler.export_chrome_trace(str(self.folder / f"step-{number}.json"))
        by = "self_cpu_time_total"
        if torch.cuda.is_available():
            by = "self_device_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=ROWS)
        (self.folder / f"step-{number}.txt").write_text(f"{_phases(record)}\n{table}\n", encoding="utf-8")


def _phases(record: Mapping[str, Any]) -> str:
    """A step's seconds by phase, with their shares of the step."""
    whole = record["time/step"]
    times = {key: value for key, value in record.items() if key.startswith("time/") and value is not None}
    # Rates are no times, and the idle time of an engine overlaps the phases: neither has a share of the step.
    shown = {key: value for key, value in times.items() if "tokens_per_second" not in key and key != "time/engine_idle"}
    return "\n".join(f"{key:20} {value:10.4f} s {value / whole:7.1%}" for key, value in shown.items())
