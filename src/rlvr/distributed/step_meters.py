"""The time, memory and operations of a step, of this rank and of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlvr.core.device_memory import PeakMemory
from rlvr.distributed.world import World
from rlvr.monitor.phases import KNOWN, Phases
from rlvr.policy.flops import UpdateFlops, peak_flops
from rlvr.rollout.plans import IdleClock

WORKING = ("update", "publish")
"""Phases in which the trainer's device works."""


@dataclass(frozen=True)
class RankUse:
    """Measurements of a rank's work in a step."""

    flops: float
    """Model FLOPs of its update."""
    tokens: int
    """Tokens of its passes with a gradient."""
    peak: float | None
    """FLOP/s that its device can do; None: not known."""
    memory: dict[str, float]
    """The metrics `memory/*` of the rank."""


class StepMeters:
    """Counts a step by phase: `with meters.phases("update"): ...`, then `finish`, on every rank, once a step."""

    def __init__(self, device: torch.device, world: World, clock: IdleClock) -> None:
        self.world = world
        self.memory = PeakMemory(device)
        self.engine_idle = clock
        self.phases = Phases(torch.profiler.record_function, (self.memory, self.engine_idle))
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            self.device_name = torch.cuda.get_device_name(device)
        else:
            self.device_name = "CPU"
        self.peak = peak_flops(self.device_name) if self.on_gpu else None

    @property
    def notice(self) -> str | None:
        """Why there is no MFU on a GPU."""
        if not self.on_gpu or self.peak is not None:
            return None
        return f"mfu/* is not reported: the peak FLOP/s of the device {self.device_name!r} is not known"

    def finish(
        self, sampled: int | None, verifying: float, computed: UpdateFlops, engine_apart: bool, starting: bool
    ) -> dict[str, float | None]:
        """The step's metrics of time, memory and use; the same on every rank but for times and the first rank's memory.

        `sampled`: tokens; `verifying`: seconds of verification beyond sampling, which count as verification;
        `engine_apart`: whether the engine samples on other devices; `starting`: most of the step's time was that of
        starting.
        """
        times = self.phases.finish()
        seconds = times["time/step"]
        idle = self.engine_idle.seconds
        if self.on_gpu:
            unused = idle_share(times, idle, engine_apart)
        else:
            unused = None
        # Both are measured apart, by different clocks of the step; the bound keeps time/rollout from going below 0.
        waited = min(verifying, times["time/rollout"])
        times["time/rollout"] -= waited
        times["time/verify"] += waited
        engine_idle = min(sum(idle.values()), seconds)
        own = RankUse(computed.flops, computed.tokens, self.peak, self.memory.peaks())
        ranks = self.world.gather(own, "memory and operations of the step")
        # None in a step that started engines or compiled: a mean over steps would be of the start.
        per_second = None
        sampling = None
        if sampled and not starting:
            per_second = sampled / seconds
            sampling = _per(sampled, seconds - engine_idle)
        return {
            **times,
            "time/tokens_per_second": per_second,
            "time/tokens_per_second_per_device": None if per_second is None else per_second / len(ranks),
            "time/sampling_tokens_per_second": sampling,
            "time/engine_idle": engine_idle,
            "gpu/idle": unused,
            **use(ranks, times["time/update"], None if starting else seconds),
        }


def use(ranks: list[RankUse], update: float, step: float | None) -> dict[str, float | None]:
    """Throughput of the update, MFU and memory, of the seconds of an update and of a step (None: not to be
    measured)."""
    peaks = [rank.peak for rank in ranks]
    if None in peaks:
        # The peak of all devices is not known where one rank's is not: no MFU rather than a wrong one.
        able = None
    else:
        able = sum(peak for peak in peaks if peak)
    flops = sum(rank.flops for rank in ranks)
    tokens = sum(rank.tokens for rank in ranks)
    largest = {f"{key}_max": max(rank.memory.get(key, 0.0) for rank in ranks) for key in ranks[0].memory}
    return {
        "time/update_tokens_per_second_per_device": _per(tokens, update * len(ranks)) if tokens else None,
        "mfu/update": _per(flops, able * update) if able and flops else None,
        "mfu/step": _per(flops, able * step) if able and flops and step else None,
        **ranks[0].memory,
        **largest,
    }


def idle_share(times: Mapping[str, float], engine_idle: Mapping[str | None, float], engine_apart: bool) -> float | None:
    """The share of a step in which neither the trainer nor an engine on its device had work.

    The trainer works in the phases `WORKING`. In the others, and in none of them, the device works while the engine has
    an open request, unless the engine is on other devices.
    """
    # idle share = sum over phases in which the trainer does not compute of min(seconds, engine's idle seconds) / step
    others: dict[str | None, float] = {phase: times[f"time/{phase}"] for phase in KNOWN if phase not in WORKING}
    others[None] = times["time/unaccounted"]
    if engine_apart:
        idle = others
    else:
        idle = {p: min(s, engine_idle.get(p, 0.0)) for p, s in others.items()}
    return _per(sum(idle.values()), times["time/step"])


def _per(count: float, seconds: float) -> float | None:
    """Return count / seconds; None where there was no time."""
    return count / seconds if seconds > 0 else None
