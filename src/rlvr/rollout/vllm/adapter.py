"""A LoRA adapter by itself, as vLLM loads it: two files per version in a folder that engine and servers read.

vLLM keeps adapters by number, so each version gets a new one; the base weights are sent once. Invariants: a request
ends with the adapter that it began with, and its tokens have that adapter's version; the files stay while such a
request is open, since vLLM may have to load them again.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlvr.policy import Policy
from rlvr.rollout.engine import Published

# Arbitrary: an adapter is some megabytes, and a request is given up within seconds.
KEPT = 2
"""Adapters before the newest whose files stay in any case: a request that was given up may be under way for a
moment."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of one version."""

    number: int
    version: int
    path: Path

    @property
    def fields(self) -> dict[str, str | int]:
        """vLLM's LoRARequest."""
        return {"lora_name": self.name, "lora_int_id": self.number, "lora_path": str(self.path)}

    @property
    def name(self) -> str:
        """The name of the adapter on servers, which no other run uses."""
        return f"{self.path.parent.name}-{self.number}"


class AdapterFiles:
    """Writes the policy's adapter to `folder`."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.policy = policy
        # Random, because the name is part of the adapter's name on servers that several runs may share.
        self.folder = folder / f"adapters-{secrets.token_hex(4)}"
        self.newest: Adapter | None = None
        """The adapter written last; requests begin with it once it is `put_to_use`."""
        self._outdated = False
        """The adapter may have changed since it was written, also to another one of the same version."""
        self._in_use: Adapter | None = None
        self._written: list[Adapter] = []
        self._open: Counter[Adapter] = Counter()
        # Requests begin and end on event loops while a publish writes on the trainer's thread.
        self._lock = threading.Lock()

    def write(self, version: int, base: Published | None) -> Published:
        """Write the adapter as version `version`, where it is not written as that already. Returns bytes and seconds,
        those of the base weights included."""
        start = time.perf_counter()
        # A server that came back is given what the others have.
        if self.newest is not None and self.newest.version == version and not self._outdated:
            return base or Published(0, 0.0)
        number = self.newest.number + 1 if self.newest else 1
        written = Adapter(number, version, self.folder / f"adapter-{number}")
        # Before `newest` is set: an adapter that could not be written is never named to an engine.
        self.policy.model.save_pretrained(written.path)
        sent = sum(file.stat().st_size for file in written.path.glob("*.safetensors"))
        self.newest = written
        self._outdated = False
        self._written.append(written)
        self._remove_old()
        seconds = time.perf_counter() - start
        if base is None:
            return Published(sent, seconds)
        return Published(sent + base.bytes, seconds + base.seconds)

    def release(self) -> None:
        """From now on the adapter may change: the next `write` writes it whatever its version, which may be one that
        was written before (of the checkpoint that a run goes back to)."""
        self._outdated = True

    def put_to_use(self) -> None:
        """Let requests from now on begin with the newest adapter."""
        with self._lock:
            self._in_use = self.newest

    @contextlib.contextmanager
    def begun(self) -> Iterator[Adapter]:
        """The adapter for a request, for as long as it is open."""
        with self._lock:
            assert self._in_use is not None, "requests come after the first publish"
            adapter = self._in_use
            self._open[adapter] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._open[adapter] -= 1

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_old(self) -> None:
        """Remove the files of adapters that no request needs."""
        with self._lock:
            # Removed outside the lock: deleting files may take long on a network file system.
            old = [a for a in self._written[: -KEPT - 1] if not self._open[a] and a != self._in_use]
            self._written = [a for a in self._written if a not in old]
        for adapter in old:
            shutil.rmtree(adapter.path, ignore_errors=True)
