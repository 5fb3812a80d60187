"""data/sparkle-hard.jsonl: the problems of sparkle-reasoning/hardmath, each also with parts of its solution.

As scripts/data/prepare_stage_two_data_aug.py of sparkle-reasoning/sparkle, commit c3581c9, with `--aug_version all`: a
problem by itself, then with the first part of its solution, the first two, and so on, of four parts. The solution is
the column CoT or, without it, solution. Parts are paragraphs in equal shares, or sentences where there are fewer than
four paragraphs; the authors try further breaks in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rlvr.config import Config
from rlvr.core.splitters import Splitter
from rlvr.data.files import Placed
from rlvr.data.sources import hub_rows
from rlvr.recipes.prepare import column

DATA = "sparkle-reasoning/hardmath"
PARTS = 4
"""Parts of a solution."""
BEGIN = "{problem}\n\nA solution may begin as follows:\n{part}"


def rows(config: Config) -> Iterator[Placed]:
    """Yield each problem alone and with its first 1 to 4 parts, in the order of the set; `info.parts` is their
    number."""
    for place, row in hub_rows(DATA, None, "train", None):
        problem = column(row, "problem", place)
        answer = column(row, "answer", place)
        yield place, {"prompt": problem, "answer": answer, "info": {"parts": 0}}
        parts = parts_of(row.get("CoT") or row.get("solution") or "")
        for count in range(1, len(parts) + 1):
            prompt = BEGIN.replace("{part}", "\n".join(parts[:count])).replace("{problem}", problem)
            yield place, {"prompt": prompt, "answer": answer, "info": {"parts": count}}


def parts_of(solution: str, parts: int = PARTS) -> list[str]:
    """The solution in `parts` parts of about as many paragraphs each, in order; of sentences where it has fewer
    paragraphs, and fewer parts where it has fewer sentences."""
    paragraphs = Splitter("blank_line").texts(solution)
    if len(paragraphs) >= parts:
        return _shares(paragraphs, parts, "\n\n")
    # A sentence ends in a mark before white space, so that 3.5 is none.
    sentences = Splitter(r"(?<=[.!?])\s+").texts(solution)
    return _shares(sentences, min(parts, len(sentences)), " ")


def _shares(texts: list[str], parts: int, between: str) -> list[str]:
    """Share n holds the texts from int(n T / parts) on: as the authors' consolidation of paragraphs."""
    edges = [number * len(texts) // parts for number in range(parts + 1)] if parts else []
    return [between.join(texts[begin:end]) for begin, end in itertools.pairwise(edges)]
