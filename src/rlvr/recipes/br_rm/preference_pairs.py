"""data/br-rm.jsonl: the pairs of the four public sets that the authors of BR-RM train on.

As dataset/preprocess_data.py of github yzjiao/BR-RM, commit 34a58b2: HelpSteer3 without ties, Skywork's pairs without
those of magpie_ultra, 8,000 pairs of code and the pairs of mathematics; about 97,000 in all. The recipe shows each in
both orders, as the authors' LocalDataset does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.recipes.prepare import column

CODE_PAIRS = 8000
CODE_SEED = 42
"""Pairs of code that are taken, in an order drawn with this seed."""


def rows(config: Config) -> Iterator[Placed]:
    """Yield the pairs, each with its context as text, set by set."""
    yield from _helpsteer()
    yield from _skywork()
    yield from _code()
    yield from _mathematics()


def _helpsteer() -> Iterator[Placed]:
    for place, row in hub_rows("nvidia/HelpSteer3", None, "train", None):
        # From -3, the first response is much better, to 3.
        preference = column(row, "overall_preference", place)
        if not preference:
            continue
        pair = [column(row, name, place) for name in ("response1", "response2")]
        better, worse = pair if preference < 0 else reversed(pair)
        yield place, _row(column(row, "context", place), better, worse, "helpsteer3")


def _skywork() -> Iterator[Placed]:
    for place, row in hub_rows("Skywork/Skywork-Reward-Preference-80K-v0.2", None, "train", None):
        if column(row, "source", place) == "magpie_ultra":
            continue
        # Conversations that differ in their last message.
        better, worse = (column(row, name, place) for name in ("chosen", "rejected"))
        yield place, _row(better[:-1], better[-1]["content"], worse[-1]["content"], "skywork")


def _code() -> Iterator[Placed]:
    pairs = list(hub_rows("Vezora/Code-Preference-Pairs", None, "train", None))
    # The order of `datasets.Dataset.shuffle` with this seed (huggingface/datasets, src/datasets/arrow_dataset.py).
    for index in np.random.default_rng(CODE_SEED).permutation(len(pairs))[:CODE_PAIRS]:
        place, row = pairs[index]
        better, worse = (column(row, name, place) for name in ("accepted", "rejected"))
        yield place, _row(_asked(column(row, "input", place)), better, worse, "code")


def _mathematics() -> Iterator[Placed]:
    for place, row in hub_rows("xinlai/Math-Step-DPO-10K", None, "train", None):
        # Both go on from the same steps.
        begun = column(row, "initial_reason_steps", place)
        better, worse = (begun + column(row, name, place) for name in ("full_chosen", "full_rejected"))
        yield place, _row(_asked(column(row, "prompt", place)), better, worse, "mathematics")


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _row(context: Iterable[dict[str, str]], better: str, worse: str, source: str) -> dict[str, Any]:
    """A row of the file; of a conversation every turn is shown."""
    turns = [f"{'User' if turn['role'] == 'user' else 'Assistant'}: {turn['content']}" for turn in context]
    return {"prompt": "\n".join(turns), "chosen": better, "rejected": worse, "source": source}
