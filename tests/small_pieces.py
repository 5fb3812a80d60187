"""A user's file of pieces, for the tests of the trainer."""

PIECES = '''
import asyncio, math, time
from dataclasses import dataclass
import numpy as np
from rlvr import Verdict, Verifier
from rlvr.data import Sampler
from rlvr.core.needs import Need

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

class Evens(Verifier):
    """As evens, without the processes that a plain function is called in."""

    def verify(self, task, completion):
        return Verdict.from_score(evens(completion))

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
        from rlvr.losses import LossTerm  # here: processes that verify import no torch then, which takes them seconds

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
