"""data/implicit-prm.jsonl: a row for each response of the authors' set, with the label of its answer.

The set is named in github PRIME-RL/ImplicitPRM, README.md; its page could not be read, so its columns are assumed.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.errors import DataError
from rlvr.recipes.prepare import column

DATA = "Windy0822/ultrainteract_math_rollout"


def rows(config: Config) -> Iterator[Placed]:
    """Yield the responses to each prompt."""
    for place, row in hub_rows(DATA, None, "train", None):
        prompt = column(row, "prompt", place)
        completions = column(row, "completions", place)
        labels = column(row, "correctness", place)
        if len(completions) != len(labels):
            raise DataError(f"{place}: {len(completions)} completions have {len(labels)} labels")
        for completion, label in zip(completions, labels, strict=True):
            yield place, {"prompt": prompt, "demonstration": completion, "label": int(label)}
