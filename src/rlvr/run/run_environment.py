"""The environment that a run was started in, as its folder keeps it: command, versions, machine, devices."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rlvr.distributed.world import PACKAGES, installed
from rlvr.planner.planned_devices import machine_memory


def run_environment() -> dict[str, Any]:
    """`started` (UTC), `command`, `versions` by package, `machine` in words and `devices` by name, those of this
    process's machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = f"{machine_memory() / 2**30:.0f} GiB of memory"
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "versions": installed(PACKAGES),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores, {memory}",
        "devices": devices,
    }


def _command(words: list[str]) -> str:
    program, *rest = words
    # `python -m rlvr.train` leaves the path of its __main__.py; the console command sets `rlvr train`.
    if Path(program).name == "__main__.py":
        begin = f"python -m rlvr.{Path(program).parent.name}"
    elif program.endswith(".py"):
        begin = f"python {shlex.quote(program)}"
    else:
        begin = program
    return " ".join([begin, *map(shlex.quote, rest)])
