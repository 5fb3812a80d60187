"""Speed of attention on a device, relative to that of matrix products: what the choice of layout is made with.

`scripts/gpu/evidence.py --write-speeds` puts what it measured on a GPU into the file `attention_speeds.json` beside
this one, by the GPU's name; a GPU that is not in it has the defaults of its class.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from rlvr.errors import ConfigError

FORMAT = 1
"""Of the file of measured speeds."""
MEASURED_FILE = Path(__file__).with_name("attention_speeds.json")
"""A file of the package and none of the user's: ranks divide a batch by these numbers, so all have to read the same,
and ranks with different versions of the package are refused."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Speed of attention on a kind of device, relative to that of the layers' matrix products."""

    pair: float
    """Time of attention forward and backward for a FLOP of its forward pass, over the same of matrix products."""
    call: float
    """FLOPs forward of matrix products that take as long, forward and backward, as what an attention call costs
    whatever its size: its start, and the gathers and the merging around it."""


def from_rates(attention: float, products: float, call: float) -> AttentionSpeed:
    """From rates, in FLOP/s, of attention and of matrix products, and the seconds of a call, all forward and backward.

    The unit is the kit's (scripts/gpu/stages/attention.py): time forward and backward for each FLOP forward. A product
    has two of its size backward, attention five products for its two: a pair is 7/6 of the quotient of the rates.
    """
    forward = products / 3
    return AttentionSpeed(pair=forward * 3.5 / attention, call=forward * call)


# Orders of magnitude: a larger `call` favours fewer levels and padded rows, a larger `pair` favours sharing prefixes.
# Those of GPUs are arithmetic from published rates of training in bfloat16: A100 190e12 of flash attention 2 (Dao 2023,
# arXiv:2307.08691, figure 5, causal, width 128) against 250e12 of matrix products (80 % of its peak of 312); H100 and
# H200 350e12 (Shah et al. 2024, arXiv:2407.08608, section 1: 35 % of 989) against 650e12. 150 us for a call and its
# merging, forward and backward, which are some thirty launches of 5 us. The CPU's are orders of magnitude without a
# measurement of their own.
_HOPPER = from_rates(350e12, 650e12, 150e-6)
SPEEDS = {
    "cpu": AttentionSpeed(pair=1.0, call=5e6),
    "A100": from_rates(190e12, 250e12, 150e-6),
    "H100": _HOPPER,
    "H200": _HOPPER,
}
"""Defaults by kind of device, for GPUs by a part of the name that CUDA gives."""
ELSEWHERE = AttentionSpeed(pair=1.8, call=2e10)
"""Of every other device, between those of the GPUs."""


def read_speeds(path: Path) -> dict[str, AttentionSpeed]:
    """The measured speeds of a file, by the whole name that CUDA gives a GPU.

    ConfigError where the file is not readable, is of another format, or has a number that is no speed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(f"{path} has format {found['format']}, and this version reads {FORMAT}")
        speeds = {name: AttentionSpeed(float(one["pair"]), float(one["call"])) for name, one in found["gpus"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no file of attention speeds ({type(error).__name__}: {error}): write it again with "
            "scripts/gpu/evidence.py --write-speeds"
        ) from error
    for name, speed in speeds.items():
        if not is_speed(speed.pair, speed.call):
            raise ConfigError(f"{path}: pair and call of {name} must be finite numbers above 0: {speed}")
    return speeds


def is_speed(pair: float, call: float) -> bool:
    """Return True for constants that a choice can be made with; the fit of noisy times may give a price below 0."""
    return 0 < pair < math.inf and 0 < call < math.inf


MEASURED = read_speeds(MEASURED_FILE)
"""By the whole name of a GPU."""
