"""What the tests of recorded rollouts share: a small configuration, a user's pieces, and comparisons."""

from __future__ import annotations

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

PIECES = '''
import random
import numpy as np
from rlvr import Verdict, Verifier

SAID = []

def evens(completion):
    """The share of even digits."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def starts_even(completion):
    """1 where the first character is an even digit, undecided for an empty text."""
    return float(completion[0] in "02468") if completion else None

def starts_odd(completion):
    return float(completion[:1] in tuple("13579"))

def chance(completion):
    """Another number each time."""
    SAID.append(completion)
    return random.SystemRandom().random()

def longer(batch): return np.asarray([r.completion_length for r in batch.rollouts]) / 6.0
def first_of_group(batch): return np.flatnonzero([r.member != 1 for r in batch.rollouts])

class Adds:
    """An environment that answers with the number of digits so far, twice."""
    def begin(self, task):
        return Episode()

class Episode:
    def __init__(self):
        self.turns = 0

    def reply(self, text):
        self.turns += 1
        return None if self.turns > 2 else str(self.turns)
'''


def task_rows(count: int = 6) -> list[dict]:
    return [{"id": f"t{n}", "prompt": f"{n}=?", "answer": str(n), "demonstration": f"{n}{n}"} for n in range(count)]


def overlaid(base, over):
    """`over` laid over `base`, mappings key by key."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: overlaid(base.get(key), value) for key, value in over.items()}}


def weights(trainer) -> dict:
    """All parameters of the policy, copied."""
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}


def changed(before: dict, after: dict) -> list[str]:
    return [name for name in before if not before[name].equal(after[name])]


def timeless(rows, *less: str) -> list[dict]:
    """Metrics without what the clock says."""
    skipped = ("time/", "publish/", "rollout/ready", *less)
    return [{key: value for key, value in row.items() if not key.startswith(skipped)} for row in rows]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def files(run: Path) -> list[Path]:
    return sorted((run / "rollouts").glob("step-*.jsonl"))
