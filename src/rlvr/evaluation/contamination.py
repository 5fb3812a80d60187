"""Evaluation tasks that stand in the training tasks: overlap of runs of words.

Brown et al. 2020, "Language models are few-shot learners", appendix C: runs of 13 words, lower case, without
punctuation. A prompt of fewer words is compared whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rlvr.monitor.batch import prompt_text
from rlvr.records import Task

WORDS = 13
LISTED = 100
_WORD = re.compile(r"\w+")


def contamination(train: Iterable[Task], held_out: Sequence[Task], words: int = WORDS) -> dict[str, Any]:
    """The evaluation tasks whose prompt shares a run of `words` words with a training prompt.

    `share` of the tasks; `found` lists the first of them with the part of their runs that is shared. Short prompts are
    equal only as a whole.
    """
    seen = {run for task in train for run in _runs(task, words)}
    overlapping: list[dict[str, Any]] = []
    for task in held_out:
        runs = list(_runs(task, words))
        shared = sum(run in seen for run in runs)
        if shared:
            overlapping.append({"id": task.id, "overlap": shared / len(runs)})
    overlapping.sort(key=lambda row: row["overlap"], reverse=True)
    return {
        "words": words,
        "tasks": len(held_out),
        "contaminated": len(overlapping),
        "share": len(overlapping) / len(held_out) if held_out else None,
        "found": overlapping[:LISTED],
    }


def _runs(task: Task, words: int) -> Iterator[int]:
    """The hashes of the prompt's runs of words; of a prompt of fewer words, of the whole."""
    text = prompt_text(task.prompt).lower()
    tokens = _WORD.findall(text)
    if len(tokens) < words:
        if text.strip():
            # Python's hash of text differs between processes, which does not matter here: both sets are made in one.
            yield hash((len(tokens), re.sub(r"\s+", "", text)))  # signs count here: 2+2 is not 2-2
        return
    # 64-bit hashes in place of texts: a few million runs of words fit in memory, and two differ
    # in text and share a hash with a probability of 2^-64 for each pair.
    for begin in range(len(tokens) - words + 1):
        yield hash(tuple(tokens[begin : begin + words]))
