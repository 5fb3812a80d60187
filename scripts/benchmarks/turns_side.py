"""A run of a workload by rlvr's GRPOTrainer that takes a step whenever it has its turn; before_after.py starts two.

    python turns_side.py WORKLOAD_AS_JSON MODEL_FOLDER RESULT.json READ_PIPE WRITE_PIPE

A byte on the first pipe is the turn, which is passed on by one on the second. The first step is taken at once, since
it starts what the others need.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ours_side import settings
from speed_workloads import Workload, prompts, score

from rlvr import GRPOTrainer

WORKLOAD: Workload


class InTurns(GRPOTrainer):
    """A trainer that waits after each step. `_record` is what every step ends with, on the training thread, in each
    version that is compared."""

    read: int
    write: int
    seconds: list[float]
    began: float | None = None

    def _record(self, *given: Any, **named: Any) -> Any:
        result = super()._record(*given, **named)
        if self.began is not None:
            self.seconds.append(time.perf_counter() - self.began)
            # What the step left to other threads is done before the other library's turn.
            time.sleep(0.005)
            os.write(self.write, b"x")
        if not os.read(self.read, 1):
            raise RuntimeError("the other run has ended before its last step")
        self.began = time.perf_counter()
        return result


def main(model: str, result: str, read: str, write: str) -> None:
    """Train, and write the seconds of the steps that had a turn."""
    torch.set_num_threads(1)
    tasks = [{"prompt": prompt} for prompt in prompts(WORKLOAD)]
    with tempfile.TemporaryDirectory() as folder:
        tree = settings(WORKLOAD, folder)
        with InTurns(model, tasks, verifier, tree) as trainer:
            trainer.read, trainer.write, trainer.seconds = int(read), int(write), []
            trainer.train()
            seconds = trainer.seconds
    with contextlib.suppress(BrokenPipeError):  # the other one may have a step left, or have ended
        os.write(int(write), b"x")
    Path(result).write_text(json.dumps(seconds))


def verifier(prompt: str, completion: str, token_ids: list[int]) -> float:
    """The reward. It holds no state, so that worker processes run it."""
    return score(WORKLOAD, prompt, completion, token_ids)


if __name__ == "__main__":
    WORKLOAD = Workload(**json.loads(sys.argv[1]))
    main(*sys.argv[2:])
