"""Run by test_memory.py in a process of its own: a real run's peak resident memory, on standard output in MiB.

python measure_memory.py CONFIG.yaml KEY=VALUE ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rlvr import GRPOTrainer
from rlvr.config.config_loading import load_config


def verifier(completion: str) -> float:
    """A reward that varies, so that every rollout trains."""
    return sum(map(ord, completion)) % 7 / 7


def main() -> None:
    torch.set_num_threads(1)
    with GRPOTrainer(config=load_config(sys.argv[1], sys.argv[2:]), verifier=verifier) as trainer:
        trainer.train()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) / 1024)


if __name__ == "__main__":
    main()
