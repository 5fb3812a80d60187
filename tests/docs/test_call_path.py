"""From a task to its gradient: docs/architecture.md names every file that the simplest run enters on the way, in
order."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest

import rlvr
from rlvr import GRPOTrainer
from rlvr.config.config_loading import load_config
from small_run import TREE, overlaid

SOURCE = f"{Path(rlvr.__file__).parent}/"
MOST_HOPS = 10
# 35 until the buffers of the LM head became a file of their own, which the memory plan counts, and 36 until the
# products of a decoding step did, of which the blocks of twenty-six families are made.
MOST_FILES = 37
MOST_FILES_OF_A_HOP = 6
SIMPLEST = {
    "model": {"scratch": {"alphabet": "12"}},
    "verifier": "exact",
    "rollout": {"prompts_per_step": 1, "group_size": 64, "max_new_tokens": 2},
}
"""One rank, the hf engine, the exact verifier. One letter of two is right, so that some members of the group are paid
and others not."""
FIRST = "_collect"
LAST = "_update"


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """Functions of the library as (file, name), in the order in which they are first entered, on all threads, from the
    step's first function to the end of its update."""
    functions: dict[tuple[str, str], None] = {}
    within = False

    def profile(frame, event, argument):
        nonlocal within
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return
        name = code.co_filename.removeprefix(SOURCE)
        if name == "trainer.py" and code.co_name in (FIRST, LAST):
            within = (event, code.co_name) != ("return", LAST)
        if within and event == "call":
            functions.setdefault((name, code.co_qualname))

    tree = overlaid(TREE, {**SIMPLEST, "run": {"steps": 1, "dir": str(tmp_path_factory.mktemp("runs"))}})
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with GRPOTrainer(None, [{"id": "t", "prompt": "12", "answer": "1"}], None, load_config(tree)) as trainer:
            (row,) = trainer.train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert 0 < row["reward/mean"] < 1 and row["grad_norm"] > 0, "the run has to have a gradient"
    return list(functions)


@pytest.fixture(scope="module")
def hops(root):
    """The function and the files that each row of the table names."""
    section = (root / "docs/architecture.md").read_text().split("## From a task to its gradient")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    return [(function.strip("`"), re.findall(r"`src/rlvr/([\w/]+\.py)`", files)) for _, function, _, files in rows]


@pytest.mark.gate
def test_the_table_names_every_file_that_is_entered_and_no_other(entered, hops):
    assert sorted(file for _, files in hops for file in files) == sorted({file for file, _ in entered})


def test_hops_stand_in_the_order_in_which_they_are_entered(entered, hops):
    """The first file of a row has the function of the hop."""
    places = [entered.index((files[0], function)) for function, files in hops]
    assert places == sorted(places)


def test_no_file_stands_in_a_row_after_the_hop_in_which_it_is_first_entered(entered, hops):
    """The end of the hop before, which prepares what it hands over, may enter a file of a hop. How much later a file is
    entered than its hop begins differs from run to run, since the collector has a thread of its own."""
    starts = [entered.index((files[0], function)) for function, files in hops]
    files = [file for file, _ in entered]
    for (function, of_hop), earliest in zip(hops, [starts[0], *starts[:-1]], strict=True):
        for file in of_hop[1:]:
            assert earliest < files.index(file), (function, file)


def test_the_path_is_short(entered, hops):
    assert len(hops) <= MOST_HOPS
    assert max(len(files) for _, files in hops) <= MOST_FILES_OF_A_HOP
    assert len({file for file, _ in entered}) <= MOST_FILES
