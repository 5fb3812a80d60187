"""data/reasonrank.jsonl: the authors' set of reinforcement, with a grade for each passage.

Columns as on the page of liuwenhan/reasonrank_data_rl: `prompt` (two messages), `label` ("[2] > [1]", the reference
ranking by the numbers of the prompt), `initial_list` (passage ids in the order of the numbers), `relevant_docids`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.recipes.prepare import column

DATA = "liuwenhan/reasonrank_data_rl"
# Matches the 2 and the 1 of `[2] > [1]`.
_NUMBER = re.compile(r"\[(\d+)\]")


def rows(config: Config) -> Iterator[Placed]:
    """Yield each query: grade 1 for a relevant passage, 0 for the others; `info.ranking` has the reference ranking."""
    for place, row in hub_rows(DATA, None, "train", None):
        passages = column(row, "initial_list", place)
        relevant = set(column(row, "relevant_docids", place))
        grades = {str(number): int(passage in relevant) for number, passage in enumerate(passages, start=1)}
        ranking = _NUMBER.findall(column(row, "label", place))
        yield place, {"prompt": column(row, "prompt", place), "answer": grades, "info": {"ranking": ranking}}
