"""The vLLM engines as a configuration names them: what is checked before one is opened, and how it is."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch

from rlvr import registry
from rlvr.core.specs import SpecLike
from rlvr.errors import ConfigError
from rlvr.policy import Policy
from rlvr.registry import register
from rlvr.rollout.engine import InFlight
from rlvr.rollout.vllm import devices, installed
from rlvr.rollout.vllm.settings import CommonSettings, EngineSettings, ServerSettings

if TYPE_CHECKING:
    from rlvr.config import RolloutConfig
    from rlvr.rollout.vllm.embedded_engine import VLLMEngine
    from rlvr.rollout.vllm.server_engine import VLLMServerEngine


@register("engine", "vllm")
@dataclass(frozen=True)
class VLLMOptions(EngineSettings):
    """A vLLM engine owned by the run, in a process of its own on the same device; each rank has one, unless the model
    is split."""

    @property
    def per_rank(self) -> bool:
        """Return whether every rank has one, beside its policy."""
        return self.tensor_parallel_size == 1

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> VLLMEngine:
        """The engine for `policy`, started. ConfigError when vLLM is missing or refuses the options."""
        from rlvr.rollout.vllm.embedded_engine import VLLMEngine

        self.check(policy.home)
        return VLLMEngine(policy, self, in_flight)

    def check(self, home: torch.device) -> None:
        """ConfigError where the engine of a policy that is computed on `home` cannot start on this machine, with the
        memory that is free now."""
        if self.transfer == "ipc" and (home.type == "cpu" or self.tensor_parallel_size > 1):
            raise ConfigError(
                "rollout.engine vllm: transfer ipc sends from a GPU to the same one, which does not go with a policy "
                "on a CPU or with tensor_parallel_size above 1: use shared_memory or auto"
            )
        installed.check(home)
        if home.type != "cpu":
            # Both before the engine starts: vLLM itself would fail after the minutes of its start, with a traceback.
            devices.check_split(home, self)
            devices.check_free(home, self)


@register("engine", "vllm-server")
@dataclass(frozen=True)
class VLLMServerOptions(ServerSettings):
    """One or many vLLM servers, started by the run on this machine or given by URL."""

    per_rank = False
    """Rank 0 asks the servers for all."""

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> VLLMServerEngine:
        """The engine for `policy`, with its servers up. ConfigError when one cannot be used."""
        from rlvr.rollout.vllm.server_engine import VLLMServerEngine

        self.check(policy.home)
        return VLLMServerEngine(policy, self, in_flight)

    def check(self, home: torch.device) -> None:
        """ConfigError where servers for a policy that is computed on `home` cannot start on this machine, or those in
        `urls` cannot reach it. What these are is asked when the engine is opened."""
        if self.urls:
            self._check_address(home)
            return
        if self.servers < 1:
            raise ConfigError("rollout.engine vllm-server: start at least one server, or give `urls`")
        if self.devices and len(self.devices) != self.servers:
            raise ConfigError(f"rollout.engine: {self.servers} servers need as many `devices`, not {len(self.devices)}")
        installed.check(home)
        if home.type != "cpu":
            each = self.tensor_parallel_size * self.data_parallel_size
            devices.check_servers(home, each, devices.of_servers(home, self.servers, each, self.devices), self)

    def _check_address(self, home: torch.device) -> None:
        """ConfigError where a server elsewhere would look for the trainer on its own machine."""
        if self.transfer_to(home) != "nccl" or not is_loopback(self.address):
            return
        for url in self.urls:
            if not is_here(urlsplit(url).hostname or ""):
                raise ConfigError(
                    f"rollout.engine: {url} is on another machine and is to take weights by NCCL from `address` "
                    f"{self.address}, which is that machine itself: set `address` to a name or address of this "
                    "machine that it reaches"
                )


def low_precision(spec: SpecLike) -> tuple[str, ...]:
    """The options in `spec`, a value of rollout.engine, by which vLLM computes in less than the policy's type."""
    options = registry.build("engine", spec)
    if isinstance(options, CommonSettings):
        return options.low_precision
    return ()


def devices_apart(spec: SpecLike) -> bool:
    """Return whether the engine that `spec`, a value of rollout.engine, writes samples on devices that no rank trains
    on."""
    return isinstance(registry.build("engine", spec), VLLMServerOptions)


def deviations(rollout: RolloutConfig) -> tuple[str, ...]:
    """The options by which an engine's log-probs differ from the trainer's by more than rounding, old weights apart."""
    options = registry.build("engine", rollout.engine)
    if not isinstance(options, CommonSettings):
        return ()
    keeps = not options.clear_cache and rollout.staleness and rollout.in_flight == "continue"
    constrained = options.structured_outputs is not None
    return (
        *options.low_precision,
        *(["clear_cache: false"] if keeps else []),
        *(["structured_outputs"] if constrained else []),
    )


def is_loopback(host: str) -> bool:
    """True for a name or address that each machine has for itself."""
    try:
        # 127.0.0.0/8 and ::1; a name other than "localhost" is resolved where it is used
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_here(host: str) -> bool:
    """True for a name or address of this machine: a socket can be bound to no other."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # Port 0, so nothing is taken; only the address has to be one of this machine.
            probe.bind(place)
    except OSError:
        return False
    return True
