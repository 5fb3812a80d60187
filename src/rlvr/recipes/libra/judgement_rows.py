"""data/judgements.jsonl: solutions of a public set, each with a judgement of the model that comes to the right verdict.

The authors' problems and solutions are not public. Those of Windy0822/ultrainteract_math_rollout stand in for them; its
page could not be read, so its columns are assumed, as in rlvr.recipes.implicit_prm.labelled_rows. The wording of the
question and the number of judgements that are looked through are chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data.files import Placed
from rlvr.recipes.implicit_prm.labelled_rows import rows as labelled_rows
from rlvr.recipes.sampled_responses import demonstrated
from rlvr.records import Task

SAMPLES = 4
QUESTION = (
    "Is this solution of a problem correct?\n\nProblem:\n{prompt}\n\nSolution:\n{solution}\n\nCheck it step by step, "
    "then end with one word: correct or incorrect."
)


def rows(config: Config) -> Iterator[Placed]:
    """Yield the solutions whose verdict one of the judgements has; the others are left out, as the supervised stage
    needs a demonstration of each."""
    tasks = [_task(number, row) for number, (_, row) in enumerate(labelled_rows(config))]
    for place, row in demonstrated(config, tasks, SAMPLES):
        if "demonstration" in row:
            yield place, row


def _task(number: int, row: dict[str, object]) -> Task:
    question = QUESTION.replace("{prompt}", str(row["prompt"])).replace("{solution}", str(row["demonstration"]))
    return Task(id=str(number), prompt=question, answer="correct" if row["label"] else "incorrect")
