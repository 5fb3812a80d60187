"""data/pairs.jsonl: the questions of the authors, each followed by its paraphrase.

Two files of github tmlr-group/Co-rewarding, commit 6c60ea4, which have the same order (verl/utils/dataset/
pair_dataset.py pairs them by their number).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.data.files import Placed, read_rows
from rlvr.errors import DataError
from rlvr.recipes.prepare import column

FOLDER = Path("data/Co-rewarding/Co-rewarding-I/data/math")
ORIGINAL = FOLDER / "train_original.parquet"
REWRITTEN = FOLDER / "train_rewrite_Qwen3-32B.parquet"


def rows(config: Config) -> Iterator[Placed]:
    """Yield each question and then its paraphrase; each names the other as `info.partner`."""
    for path in (ORIGINAL, REWRITTEN):
        if not path.exists():
            raise DataError(
                f"{path} is not there: git clone https://github.com/tmlr-group/Co-rewarding data/Co-rewarding"
            )
    for number, pair in enumerate(zip_longest(read_rows(ORIGINAL), read_rows(REWRITTEN))):
        if None in pair:
            raise DataError(f"{ORIGINAL} and {REWRITTEN} have different numbers of rows: they are no pairs")
        for own, other, (place, row) in zip("ab", "ba", pair, strict=True):
            yield place, _task(f"{number}{own}", f"{number}{other}", row, place)


def _task(own: str, partner: str, row: dict[str, Any], place: str) -> dict[str, Any]:
    # A system message asks for the box; the recipe's own template does that.
    asked = column(row, "prompt", place)[-1]["content"]
    answer = column(row, "reward_model", place)["ground_truth"]
    return {"id": own, "prompt": asked, "answer": answer, "info": {"partner": partner}}
