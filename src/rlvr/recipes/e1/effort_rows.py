"""data/effort.jsonl: the problems of DeepScaleR, each with several efforts.

The paper draws the effort anew for each draw of a problem; here each problem stands once for each of four efforts. The
set, the four values and the sentence are chosen here: no code of the authors is public.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.recipes.prepare import column

DATA = "agentica-org/DeepScaleR-Preview-Dataset"
EFFORTS = (0.25, 0.5, 0.75, 1.0)
"""Multiples of the usual length of a response."""


def rows(config: Config) -> Iterator[Placed]:
    """Yield each problem with each effort, in the order of the set."""
    for place, row in hub_rows(DATA, None, "train", None):
        problem = column(row, "problem", place)
        answer = column(row, "answer", place)
        for effort in EFFORTS:
            prompt = f"{problem}\nUse {effort:g} times your usual effort."
            yield place, {"prompt": prompt, "answer": answer, "info": {"effort": effort}}
