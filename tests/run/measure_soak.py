"""Run by test_soak.py in a process of its own: a long run, and what the process holds every few steps, as JSON lines.

python measure_soak.py FOLDER STEPS EVERY CODE    (CODE 1: a third of the tasks are programs that run in the sandbox)
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlvr import GRPOTrainer
from small_run import TREE, overlaid, task_rows

FUNCTIONS = '''
import asyncio

def digits(completion, token_ids):
    """Varies within a group, so that most groups train."""
    return float(sum(token_ids) % 3 == 0)

async def later(completion, token_ids):
    await asyncio.sleep(0)
    return float(sum(token_ids) % 2 == 0)
'''

PAGE = os.sysconf("SC_PAGE_SIZE")


def rows(functions: Path, code: bool) -> list[dict[str, Any]]:
    """Twelve tasks, whose verifiers are a function, an async function and the code verifier in turn."""
    verifiers = [f"{functions}:digits", f"{functions}:later", "code" if code else f"{functions}:digits"]
    tasks = [{**row, "verifier": verifiers[n % 3]} for n, row in enumerate(task_rows(12))]
    # A program of digits prints nothing: it passes where it is one at all (`7 = 7` is not), so that scores differ.
    cases = {"kind": "stdio", "cases": [{"input": "", "output": ""}]}
    return [{**task, "info": cases} if task["verifier"] == "code" else task for task in tasks]


def resident(pid: int | str) -> int:
    """Bytes of a process that are in memory, 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def descendants() -> list[int]:
    """The processes below this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    result, frontier = [], {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        result += frontier
    return result


def bytes_of(records: list[dict[str, Any]]) -> int:
    """Memory that the rows of metrics take, which the trainer keeps on purpose."""
    return sum(sys.getsizeof(row) + sum(sys.getsizeof(value) for value in row.values()) for row in list(records))


class Sampler:
    """A tracker that writes what the process holds after every so many steps."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every
        self.trainer: GRPOTrainer | None = None

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Nothing to begin."""

    def log_rollouts(self, step: int, rows: Any) -> None:
        """Rollouts are not of interest."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line."""
        if step % self.every or self.trainer is None:
            return
        gc.collect()
        children = descendants()
        line = {
            "step": step,
            "seconds": metrics["time/step"],
            "rss": resident("self"),
            "metrics": bytes_of(self.trainer.metrics),
            "children": len(children),
            "children_rss": sum(map(resident, children)),
            "threads": threading.active_count(),
            "os_threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "objects": len(gc.get_objects()),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """Nothing to end."""


def main() -> None:
    torch.set_num_threads(1)
    folder, steps, every, code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    functions = folder / "functions.py"
    functions.write_text(FUNCTIONS)
    tasks = rows(functions, code)
    tree = overlaid(
        TREE,
        {
            "run": {"steps": steps, "dir": str(folder), "name": "soak"},
            "rollout": {"staleness": 1, "prompts_per_step": 3},
            "algorithm": {"kl": {"coef": 0.05}},
            "optim": {"lr": 1e-3},
            "evaluation": {"every": 100, "samples": 2, "k": [1, 2], "limit": 6},
            "checkpoint": {"every": 50},
            "logging": {"rollouts": 1},
            # As many workers as will ever be busy: by default the pool adds some whenever the machine is slow, up
            # to 64.
            "verification": {"workers": 2},
        },
    )
    sampler = Sampler(folder / "samples.jsonl", every)
    with GRPOTrainer(None, tasks, None, tree, eval_tasks=tasks[:6], trackers=[sampler]) as trainer:
        sampler.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main()
