"""All ranks must run the same versions: two of one package can differ in what they compute or in what they exchange."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from rlvr.distributed.world import World
from rlvr.errors import ConfigError

PACKAGES = ("rlvr", "torch", "transformers", "deepspeed", "peft", "numpy")


def versions() -> dict[str, str]:
    """The versions here, by package; `none` where it is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def check_versions(world: World) -> None:
    """ConfigError names each package that is not the same on all ranks, and who has which."""
    of_rank = world.gather(versions(), "the versions of packages")
    wrong = []
    for package in of_rank[0]:
        ranks: dict[str, list[str]] = {}
        for rank, found in enumerate(of_rank):
            ranks.setdefault(found[package], []).append(str(rank))
        if len(ranks) > 1:
            wrong.append(f"{package} is " + ", ".join(f"{v} on rank {' '.join(who)}" for v, who in ranks.items()))
    if wrong:
        raise ConfigError(f"the ranks run different versions: {'; '.join(wrong)}; install the same on all machines")
