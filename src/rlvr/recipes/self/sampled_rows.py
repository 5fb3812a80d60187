"""data/self.jsonl: the problems of DeepScaleR with a right response of the base model, where it has one.

The likelihood of these responses holds the policy to what it could do before: the paper's forward KL. The number of
samples that are looked through is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data import load_tasks
from rlvr.data.files import Placed
from rlvr.recipes.sampled_responses import demonstrated

DATA = "agentica-org/DeepScaleR-Preview-Dataset"
SAMPLES = 4


def rows(config: Config) -> Iterator[Placed]:
    """Yield the problems in the order of the set, those without a right response too."""
    tasks = load_tasks({"path": DATA, "fields": {"prompt": "problem", "answer": "answer"}})
    return demonstrated(config, tasks, SAMPLES)
