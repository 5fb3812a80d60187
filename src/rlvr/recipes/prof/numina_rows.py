"""data/numina-math.jsonl: the problems that the authors of PROF train on, each with its answer.

As github amazon-science/PROF-GRPO, commit 8164ec2, prof_grpo/data/download_numina.py and
prof_grpo/scripts/data_preprocess/numina_math.py read them; their limit of 700 tokens of a problem is left to
`data.max_prompt_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.recipes.prepare import column

DATA = "Chenlu123/numia_prompt_ppo"


def rows(config: Config) -> Iterator[Placed]:
    """Yield the problems in the order of the set."""
    for place, row in hub_rows(DATA, None, "train", None):
        graded = column(row, "reward_model", place)
        yield place, {"prompt": column(row, "problem", place), "answer": column(graded, "ground_truth", place)}
