"""Where the GPU kit is, and how its commands are run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from gpu_kit_paths import KIT


@pytest.fixture
def run_kit():
    """`run_kit(*arguments, kit=KIT, path="", timeout=280)`: (exit code, JSON lines that were printed, standard
    error)."""

    def run(*arguments, kit=KIT, path="", timeout=280):
        environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(kit / "evidence.py"), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    return run
