"""What the tests of recorded rollouts share: a user's file of pieces, and what differs when a run is trained again."""

from __future__ import annotations

from pathlib import Path

import small_run

PIECES = '''
import random
import numpy as np
from rlvr import Verdict, Verifier

SAID = []

def evens(completion):
    """The share of even digits."""
    return sum(c in "02468" for c in completion) / max(1, len(completion))

class Evens(Verifier):
    def verify(self, task, completion):
        return Verdict.from_score(evens(completion))

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


def timeless(rows, *less: str) -> list[dict]:
    """Metrics without what the clock says, and without what only a run that samples has."""
    kept = small_run.timeless(rows, "publish/", "rollout/ready", *less)
    return [{key: value for key, value in row.items() if key != "entropy"} for row in kept]


def files(run: Path) -> list[Path]:
    return sorted((run / "rollouts").glob("step-*.jsonl"))
