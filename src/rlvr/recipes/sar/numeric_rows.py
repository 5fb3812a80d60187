r"""data/sar-numeric.jsonl: problems of MATH, OpenR1-Math-220k and GSM8K whose answer is a number or a \frac.

As github amazon-science/Self-Aligned-Reward-Towards_Effective_and_Efficient_Reasoners, commit 08892d0, makes
data/math_combined_all_all: preconfig.sh, examples/data_preprocess/math_data.py, openr1.py, gsm8k.py and
merge_datasets.py (at most 10,000 of a set, drawn with seed 42); verl/utils/dataset/rl_dataset.py keeps a question once.
Golds without a digit, which the pattern of the authors lets through, are left out, and texts of GSM8K stay as they are
(theirs are normalised by ftfy and NFKC).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import datasets
import numpy as np

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.recipes.prepare import column
from rlvr.verifiers.answers import extract_answer

MATH = "DigitalLearningGmbH/MATH-lighteval"
OPENR1 = "open-r1/OpenR1-Math-220k"
GSM8K = "openai/gsm8k"
LARGEST = 10_000
"""Rows of a set."""
SEED = 42
TEST_SHARE = 0.08
"""The share of OpenR1 that the authors keep for tests."""
LONGEST_ANSWER = 20
# Matches `-3`, `(0.5)`, `2\frac{1}{3}`; not `x`, `\sqrt{2}`, `1,000`.
_NUMERIC = re.compile(r"[-0-9.()\\]*(\\frac\{[1-9][0-9]*\}\{[1-9][0-9]*\})?[-0-9.()\\]*")


def rows(config: Config) -> Iterator[Placed]:
    """Yield the problems, set by set; the same for all runs."""
    known: set[str] = set()
    for made in (_of_math(), _of_openr1(), _of_gsm8k()):
        found = list(made)
        if len(found) > LARGEST:
            # As pandas.DataFrame.sample draws with this random_state.
            drawn = np.random.RandomState(SEED).choice(len(found), size=LARGEST, replace=False)
            found = [found[number] for number in drawn.tolist()]
        for place, row in found:
            if row["prompt"] not in known:
                known.add(row["prompt"])
                yield place, row


def _of_math() -> Iterator[Placed]:
    for place, row in hub_rows(MATH, None, "train", None):
        answer = extract_answer(column(row, "solution", place), ("boxed",))
        if _is_numeric(answer):
            yield place, {"prompt": column(row, "problem", place), "answer": answer}


def _of_openr1() -> Iterator[Placed]:
    kept = [
        (place, {"prompt": row["problem"], "answer": row["answer"]})
        for place, row in hub_rows(OPENR1, "default", "train", None)
        if column(row, "question_type", place) == "math-word-problem"
        and any(column(row, "correctness_math_verify", place) or ())
        and "http" not in column(row, "problem", place) + column(row, "solution", place)
        and _is_numeric(column(row, "answer", place))
    ]
    if len(kept) > 1:
        numbers = datasets.Dataset.from_dict({"number": list(range(len(kept)))})
        trained = numbers.train_test_split(test_size=TEST_SHARE, seed=SEED)["train"]["number"]
        kept = [kept[number] for number in trained]
    return iter(kept)


def _of_gsm8k() -> Iterator[Placed]:
    for place, row in hub_rows(GSM8K, "main", "train", None):
        answer = column(row, "answer", place).rpartition("####")[2].strip()
        yield place, {"prompt": column(row, "question", place), "answer": answer}


def _is_numeric(answer: str | None) -> bool:
    return (
        answer is not None
        and len(answer) <= LONGEST_ANSWER
        and _NUMERIC.fullmatch(answer) is not None
        and any(character.isdigit() for character in answer)
    )
