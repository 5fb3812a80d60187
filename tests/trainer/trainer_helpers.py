"""What the tests of the trainer share: a small configuration, a user's file of pieces, and comparisons."""

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

PIECES = '''
import asyncio, math, time
from dataclasses import dataclass
import numpy as np
import torch
from rlvr import Verdict, Verifier
from rlvr.data import Sampler
from rlvr.losses import LossTerm
from rlvr.needs import Need

CONSTANT = 3

def evens(completion):
    """The share of even digits."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

def slow(completion):
    time.sleep(0.15)
    return evens(completion)

def raises(completion): raise RuntimeError("no verdict from me")
def nan(completion): return math.nan
def text(completion): return "0.5"
def none(completion): return None

async def later(completion):
    await asyncio.sleep(0)
    return evens(completion)

async def later_raises(completion):
    await asyncio.sleep(0)
    raise RuntimeError("late")

def sometimes(completion, token_ids):
    """Undecided for completions that begin with an even digit."""
    return None if completion[:1] in tuple("02468") else evens(completion)

class Odd(Verifier):
    def __init__(self, weight: float = 1.0):
        self.weight = weight

    def verify(self, task, completion):
        share = sum(c in "13579" for c in completion) / max(1, len(completion))
        return Verdict.from_score(share * self.weight, answer=completion)

@dataclass(frozen=True)
class Reinforce:
    """-A log pi."""
    scale: float = 1.0
    average = "tokens"
    needs = frozenset({Need("logprobs", grad=True)})

    def __call__(self, tokens, over):
        return LossTerm(-tokens.average(self.scale * tokens.advantage * tokens.logprobs, self.average, over))

def centred(batch, *, scale: float = 1.0):
    reward = np.nan_to_num(batch.column("reward"))
    return scale * (reward - reward.mean())

def by_token(batch):
    rewards = batch.column("reward") - batch.column("reward").mean()
    return [r * np.linspace(1, 0.5, len(rollout)) for r, rollout in zip(rewards, batch.rollouts)]

def one_number(batch): return 1.0

def longer(batch): return np.asarray([r.completion_length > 2 for r in batch.rollouts])
def first_of_group(batch): return np.flatnonzero([r.member < 2 for r in batch.rollouts])
def nothing(batch): return np.zeros(len(batch), dtype=bool)

def digits(completion, answer):
    return float(answer in completion)

class Backwards(Sampler):
    def order(self, epoch, size):
        return range(size)[::-1]

def preset(): return {"advantage": {"name": "group", "scale": "none"}}
'''


def task_rows(count: int = 6) -> list[dict]:
    return [{"id": f"t{n}", "prompt": f"{n}=?", "answer": str(n), "demonstration": f"{n}{n}"} for n in range(count)]


def overlaid(base, over):
    """`over` laid over `base`, mappings key by key; None in `over` removes the key."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return copy.deepcopy(over)
    merged = {**base, **{key: overlaid(base.get(key), value) for key, value in over.items()}}
    return {key: value for key, value in merged.items() if value is not None}


def weights(trainer) -> dict:
    """All parameters of the policy, copied."""
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}


def changed(before: dict, after: dict) -> list[str]:
    return [name for name in before if not before[name].equal(after[name])]


def timeless(rows) -> list[dict]:
    """Metrics without what the clock says."""
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
