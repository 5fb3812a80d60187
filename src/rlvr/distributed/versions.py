"""All ranks must run the same versions: two of one package can differ in what they compute or in what they exchange."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from rlvr.distributed.world import World
from rlvr.errors import ConfigError

# Those that compute or exchange on every rank; vLLM samples on one side only and is checked there.
PACKAGES = ("rlvr", "torch", "transformers", "deepspeed", "peft", "numpy")


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions here, Python's and those of the packages that are installed, by name."""
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):  # rlvr itself, run from a source tree, say
            versions[package] = version(package)
    return versions


def check_versions(world: World) -> None:
    """ConfigError names each package that is not the same on all ranks, and who has which."""
    of_rank = world.gather(installed(PACKAGES), "the versions of packages")
    wrong = []
    for package in ("python", *PACKAGES):
        ranks: dict[str, list[str]] = {}
        for rank, versions in enumerate(of_rank):
            ranks.setdefault(versions.get(package, "none"), []).append(str(rank))
        if len(ranks) > 1:
            wrong.append(f"{package} is " + ", ".join(f"{v} on rank {' '.join(who)}" for v, who in ranks.items()))
    if wrong:
        raise ConfigError(f"the ranks run different versions: {'; '.join(wrong)}; install the same on all machines")
