"""A small run that trains in a fraction of a second, for tests of whole runs: its configuration, tasks and
comparisons."""

from __future__ import annotations

import copy
import json
from pathlib import Path

ALPHABET = "0123456789=? "

TREE = {
    "run": {"steps": 3, "seed": 0},
    "model": {
        "device": "cpu",
        "scratch": {
            "hidden_size": 32,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "intermediate_size": 64,
            "context": 64,
            "alphabet": ALPHABET,
            "init_std": 0.2,
        },
    },
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 6},
    "optim": {"lr": 1e-2},
    "logging": {"console": "off"},
}

LOG_RATIO_LOSSES = ("dro", "kl_cov", "pacs", "rover")
"""Losses, and presets of the same names, that need two optimizer steps per batch: in the first their log-ratio is 0."""

PARTS_OF = {"clip_local_and_global": "consistency"}
"""Losses that read parts of the advantage -> the advantage that makes them."""


def task_rows(count: int = 6) -> list[dict]:
    return [{"id": f"t{n}", "prompt": f"{n}=?", "answer": str(n), "demonstration": f"{n}{n}"} for n in range(count)]


def overlaid(base, over):
    """`over` laid over `base`, mappings key by key; None in `over` removes the key."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return copy.deepcopy(over)
    # Copied whole: a test may change the result in place, and other tests lay theirs over the same base.
    merged = {**copy.deepcopy(base), **{key: overlaid(base.get(key), value) for key, value in over.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def beside(name) -> dict:
    """The settings that a loss or preset of this name needs beside the small run's to be accepted."""
    needed = {"optim": {"updates_per_batch": 2}} if name in LOG_RATIO_LOSSES else {}
    if str(name) in PARTS_OF:
        needed["algorithm"] = {"advantage": PARTS_OF[name]}
    return needed


def weights(trainer) -> dict:
    """All parameters of the policy, copied."""
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}


def changed(before: dict, after: dict) -> list[str]:
    return [name for name in before if not before[name].equal(after[name])]


def timeless(rows, *less: str) -> list[dict]:
    """Metrics without what the clock says, and without those that begin with `less`."""
    return [{key: value for key, value in row.items() if not key.startswith(("time/", *less))} for row in rows]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
