"""Stage 1: the machine, its best rates, missing packages, and the tests of tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from stages.context import ROOT, Context
from stages.measuring import copy_rate, matrix_rate

NEEDED = {
    "base": ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "orjson"),
    "deepspeed": ("deepspeed", "hjson"),
    "vllm": ("vllm", "msgspec", "xgrammar", "zmq"),
}
"""Modules by the piece of pieces.py that brings them."""


def run(context: Context) -> None:
    """Look at the machine, then run the tests."""
    context.measure("missing", missing)
    context.measure("ceilings", ceilings, context)
    context.measure("nvidia-smi", nvidia_smi)
    context.measure("import rlvr", import_library)
    context.measure("tests/gpu", tests, context, expected=5)


def missing() -> dict[str, list[str]]:
    """The modules that are not here, by piece."""
    found = {
        piece: [name for name in names if importlib.util.find_spec(name) is None] for piece, names in NEEDED.items()
    }
    return {piece: names for piece, names in found.items() if names}


def ceilings(context: Context) -> dict[str, float]:
    """The best rates of the device, which other stages are compared with."""
    size = 256 if context.toy else 8192
    return {
        "bfloat16_tflops": round(matrix_rate(context.device, torch.bfloat16, size) / 1e12, 3),
        "float32_tflops": round(matrix_rate(context.device, torch.float32, size) / 1e12, 3),
        "copy_gb_per_second": round(copy_rate(context.device, 1 << (22 if context.toy else 32)) / 1e9, 1),
    }


def nvidia_smi() -> str | None:
    """Driver, clocks and what else runs on the GPU; None where there is no such program."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def import_library() -> str:
    """The version of the library, imported with the trainer and all that it needs."""
    import rlvr
    import rlvr.trainer

    return rlvr.__version__


def tests(context: Context) -> dict[str, Any]:
    """Counts of tests/gpu, and what failed; skipped, all of them, where there is no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={report}"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if context.toy else None
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, context.seconds_left()),
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    if counts["failures"] + counts["errors"]:
        raise AssertionError(f"{counts}: {done.stdout[-4000:]}")
    return {**counts, "seconds": float(suite.attrib["time"])}
