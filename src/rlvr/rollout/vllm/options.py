"""The two vLLM engines that a configuration can name: their checks on this machine, and how they are opened."""

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
    """A vLLM engine that the run starts in a separate process on the trainer's device. Each rank has its own, unless
    the model is split (tensor_parallel_size above 1)."""

    @property
    def per_rank(self) -> bool:
        """Return True if every rank has an engine of its own."""
        return self.tensor_parallel_size == 1

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> VLLMEngine:
        """Start the engine for `policy`. ConfigError when vLLM is missing or refuses the options."""
        from rlvr.rollout.vllm.embedded_engine import VLLMEngine

        self.check(policy.home)
        return VLLMEngine(policy, self, in_flight)

    def check(self, home: torch.device) -> None:
        """ConfigError where an engine for a policy on the device `home` cannot start on this machine with the memory
        that is free now."""
        if self.transfer == "ipc" and (home.type == "cpu" or self.tensor_parallel_size > 1):
            raise ConfigError(
                "rollout.engine vllm: transfer ipc sends from a GPU to the same one, so it cannot be used with a "
                "policy on a CPU or with tensor_parallel_size above 1: use shared_memory or auto"
            )
        installed.check(home)
        if home.type != "cpu":
            # Checked here, because vLLM itself would fail only minutes later, during its start, with a traceback.
            devices.check_split(home, self)
            devices.check_free(home, self)


@register("engine", "vllm-server")
@dataclass(frozen=True)
class VLLMServerOptions(ServerSettings):
    """One or more vLLM servers, which the run starts on this machine or `urls` names."""

    per_rank = False
    """Rank 0 sends the requests of all ranks to the servers."""

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> VLLMServerEngine:
        """Start or connect to the servers for `policy`. ConfigError when one cannot be used."""
        from rlvr.rollout.vllm.server_engine import VLLMServerEngine

        self.check(policy.home)
        return VLLMServerEngine(policy, self, in_flight)

    def check(self, home: torch.device) -> None:
        """ConfigError where servers for a policy on the device `home` cannot start on this machine, or where those in
        `urls` could not connect to the trainer. Servers in `urls` are not contacted here, only in `open`."""
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
        """ConfigError where `address` is a loopback address and a server of `urls` is on another machine: for an NCCL
        transfer it would connect to its own machine instead of the trainer's."""
        if self.transfer_to(home) != "nccl" or not is_loopback(self.address):
            return
        for url in self.urls:
            if not is_here(urlsplit(url).hostname or ""):
                raise ConfigError(
                    f"rollout.engine: {url} is on another machine and would connect to `address` {self.address} for "
                    "weights by NCCL, which there means that machine itself: set `address` to a name or address of "
                    "this machine that the server can reach"
                )


def low_precision(spec: SpecLike) -> tuple[str, ...]:
    """The options in `spec`, a value of rollout.engine, that make vLLM compute in a lower precision than the policy's
    dtype."""
    options = registry.build("engine", spec)
    if isinstance(options, CommonSettings):
        return options.low_precision
    return ()


def devices_apart(spec: SpecLike) -> bool:
    """Return True if `spec`, a value of rollout.engine, samples on devices on which no rank trains."""
    return isinstance(registry.build("engine", spec), VLLMServerOptions)


def deviations(rollout: RolloutConfig) -> tuple[str, ...]:
    """The options that make an engine's log-probs differ from the trainer's by more than rounding. The effect of
    sampling with older weights (staleness) is not included."""
    options = registry.build("engine", rollout.engine)
    if not isinstance(options, CommonSettings):
        return ()
    keeps_old_cache = not options.clear_cache and rollout.staleness and rollout.in_flight == "continue"
    constrained = options.structured_outputs is not None
    return (
        *options.low_precision,
        *(["clear_cache: false"] if keeps_old_cache else []),
        *(["structured_outputs"] if constrained else []),
    )


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address or "localhost". Other names are not resolved."""
    try:
        # 127.0.0.0/8 and ::1
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_here(host: str) -> bool:
    """Return True if `host` is a name or address of this machine, by binding a socket to it."""
    try:
        family, socket_type, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket_type) as probe:
            # Port 0 lets the kernel choose a free port, so that only the address can make this fail.
            probe.bind(address)
    except OSError:
        return False
    return True
