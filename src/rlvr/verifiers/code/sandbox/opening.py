"""The choice of a runner: the strongest tier whose self-test holds, a tier by name, or a service elsewhere."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Sequence

from rlvr.core.daemon_calls import in_daemon
from rlvr.errors import ConfigError, nearest
from rlvr.verifiers.code.runner import Runner
from rlvr.verifiers.code.sandbox.escape_probe import weakness
from rlvr.verifiers.code.sandbox.local import LocalRunner
from rlvr.verifiers.code.sandbox.remote import RemoteRunner
from rlvr.verifiers.code.sandbox.tiers import ESCAPES, TIERS, Tier, missing

log = logging.getLogger(__name__)


def open_runner(tier: str = "auto", unsafe: bool = False, workers: int | None = None) -> Runner:
    """A runner: `tier` is `auto` (the strongest that holds here), a tier's name, or the http address of a
    SandboxFusion.

    ConfigError where the tier fails its self-test, and for every tier below `full` unless `unsafe`. `workers` programs
    run at once, by default one per core.
    """
    if tier.startswith(("http://", "https://")):
        return RemoteRunner(tier, workers)
    tiers = {one.name: one for one in TIERS}
    if tier != "auto" and tier not in tiers:
        raise ConfigError(f"there is no sandbox {tier!r}{nearest(tier, ['auto', *tiers])}")
    wanted = TIERS if tier == "auto" else (tiers[tier],)
    chosen = _strongest(wanted if unsafe else [one for one in wanted if not one.not_stopped])
    _announce(chosen.name)
    return LocalRunner(chosen, workers)


def _strongest(tiers: Sequence[Tier]) -> Tier:
    problems = []
    for tier in tiers:
        problem = problem_of(tier)
        if problem is None:
            return tier
        problems.append(f"{tier.name}: {problem}")
    weaker = "; ".join(f"{one.name} does not stop {in_words(one)}" for one in TIERS if one.not_stopped)
    if problems:
        failures = f"programs cannot be isolated here as asked ({'; '.join(problems)}). "
    else:
        failures = ""
    raise ConfigError(f"{failures}A tier below 'full' needs unsafe: true. {weaker}")


def in_words(tier: Tier) -> str:
    """Return the escapes that a tier does not stop, in words."""
    return ", ".join(ESCAPES[name] for name in tier.not_stopped)


@functools.cache
def problem_of(tier: Tier) -> str | None:
    """Return the reason why a tier cannot be used here, or None; tried once in a process."""
    lacking = missing(tier)
    if lacking is not None:
        return lacking
    try:
        # In a thread, since the caller may have a loop of its own.
        return in_daemon(lambda: asyncio.run(weakness(tier)), "rlvr-sandbox-self-test").result()
    # The self-test itself may fail in ways of the host; whatever it is, the tier is not to be trusted.
    except Exception as error:
        return f"the self-test failed: {type(error).__name__}: {error}"


@functools.cache
def _announce(name: str) -> None:
    tier = next(one for one in TIERS if one.name == name)
    if tier.not_stopped:
        log.warning("programs run in the sandbox %r, which does not stop %s", name, in_words(tier))
    else:
        log.info("programs run in the sandbox %r", name)
