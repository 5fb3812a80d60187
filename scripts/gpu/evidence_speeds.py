"""The constants of the choice of layout, from the JSON lines that evidence.py wrote: by the name of the GPU, in the
file of the library that its cost model reads (src/rlvr/policy/attention_speeds.json)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence_page import read_lines

ATTENTION = 2
"""Number of the stage that measures them."""
RESULT = "constants of library shared"
"""The result that has them: of rows with a shared prompt, in which a call's price has its merging too."""


def write_speeds(path: Path, evidence: Path) -> list[str]:
    """Put the constants of every GPU of `evidence` into `path`, in place of those it had, and keep those of other GPUs;
    the names of the GPUs.

    ValueError where the evidence has none.
    """
    found = measured(read_lines(evidence))
    if not found:
        raise ValueError(
            f"{evidence} has no constants of attention that were measured on a GPU: run stage {ATTENTION} on one"
        )
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["gpus"] = dict(sorted({**kept["gpus"], **found}.items()))
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return sorted(found)


def measured(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By the name of a GPU, the newest constants that are above 0: the fit of noisy times may give others."""
    found = {}
    for line in lines:
        value = line["results"].get(RESULT)
        if line["stage"] != ATTENTION or line.get("asked_device") != "cuda" or not line.get("device") or not value:
            continue
        pair, call = float(value["speed_pair"]), float(value["speed_call"])
        if 0 < pair < math.inf and 0 < call < math.inf:
            torch = line.get("versions", {}).get("torch")
            found[gpu_name(line["device"])] = {"pair": pair, "call": call, "torch": torch, "begun": line.get("begun")}
    return found


def gpu_name(device: str) -> str:
    """The name that CUDA gives a GPU, of the words by which a stage names its device."""
    return device.partition(",")[0].strip()
