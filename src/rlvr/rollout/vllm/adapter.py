"""A LoRA adapter by itself, as vLLM loads it: two files per version in the scratch folder.

vLLM keeps adapters by number, so each version gets a new one; the base weights are sent once.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr.policy import Policy
from rlvr.policy.adapters import plain_weights
from rlvr.rollout.engine import Bucket, Published


class AdapterFiles:
    """Writes the policy's adapter; `current` is vLLM's LoRARequest of the newest, None before the first."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.policy, self.folder = policy, folder
        self.current: dict[str, Any] | None = None
        self._number, self._version = 0, -1

    def write(self, version: int, base: Published | None) -> Published:
        """Write the adapter as version `version`; what it took, that of the base weights included."""
        start = time.perf_counter()
        if self._version == version and self.current is not None:  # for a server that came back
            return base or Published(0, 0.0)
        self._version = version
        self._number += 1
        path = self.folder / f"adapter-{self._number}"
        self.policy.model.save_pretrained(path)
        sent = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        shutil.rmtree(self.folder / f"adapter-{self._number - 3}", ignore_errors=True)  # none of its requests is open
        self.current = {"lora_name": f"policy-{self._number}", "lora_int_id": self._number, "lora_path": str(path)}
        seconds = time.perf_counter() - start
        return Published(sent, seconds) if base is None else Published(sent + base.bytes, seconds + base.seconds)


def base_weights(policy: Policy) -> Iterator[Bucket]:
    """The weights under the adapter, one by one: they are sent once."""
    for name, tensor in plain_weights(policy.model).items():
        yield [(name, tensor)]
