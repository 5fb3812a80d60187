"""The tasks that a tuned model keeps, gains and loses against its base model, and the spread of their answers.

Wu et al. 2025, "The Invisible Leash", arXiv 2507.14843v4: definition 3.3 (the four rates), section 5.1 (entropy of the
answers), appendix C.4 (the probability below which a right answer may have stayed unseen).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.analysis.analysis_table import AnalysisTable, Evaluated, common_ids, parts_of
from rlvr.errors import DataError
from rlvr.evaluation import TaskResult
from rlvr.evaluation.task_result import column, mean

# The confidence of appendix C.4 is 95 %.
MISSED = 0.05


@dataclass(frozen=True)
class SupportCounts:
    """The numbers of tasks with a right sample of both models (preserved), only of the tuned one (expanded), only of
    the base model (shrunk), and of neither."""

    preserved: int
    expanded: int
    shrunk: int
    neither: int

    @classmethod
    def of(cls, base: Sequence[TaskResult], tuned: Sequence[TaskResult]) -> SupportCounts:
        """Count the same tasks of both; samples count, greedy responses do not."""
        pairs = [(b.correct > 0, t.correct > 0) for b, t in zip(base, tuned, strict=True)]
        kinds = ((True, True), (False, True), (True, False), (False, False))
        return cls(*(pairs.count(kind) for kind in kinds))

    @property
    def retention(self) -> float | None:
        """SRR = P / (P + S), in [0, 1]: the share of what the base model solves that is kept."""
        return _ratio(self.preserved, self.preserved + self.shrunk)

    @property
    def discovery(self) -> float | None:
        """NDR = E / (P + E), in [0, 1]: the share of what the tuned model solves that is new."""
        return _ratio(self.expanded, self.preserved + self.expanded)

    @property
    def dynamic_score(self) -> float | None:
        """SDS, the harmonic mean of both rates, in [0, 1]: 2 P E / (P^2 + 2 P E + E S); 0 where one of them is 0."""
        if self.retention is None or self.discovery is None:
            return None
        both = self.retention + self.discovery
        return 2 * self.retention * self.discovery / both if both else 0.0

    @property
    def net_change(self) -> float | None:
        """NSCR = (E - S) / (P + E + S), in [-1, 1]: below 0 where more tasks are lost than gained."""
        return _ratio(self.expanded - self.shrunk, self.preserved + self.expanded + self.shrunk)


def _ratio(above: int, below: int) -> float | None:
    return above / below if below else None


def support_table(base: Evaluated, tuned: Sequence[Evaluated], ks: Sequence[int] = ()) -> AnalysisTable:
    """A row for each tuned model and each part of the tasks; `ks` are those of pass@k, by default the fewest samples.

    DataError for a k above the samples of a task, and where the evaluations have no task in common.
    """
    notes: list[str] = []
    ids = common_ids([base, *tuned], notes)
    fewest = [min(t.samples for t in one.on(ids)) for one in (base, *tuned)]
    chosen = list(ks) or [max(1, min(fewest))]
    if max(chosen) > min(fewest):
        raise DataError(f"pass@{max(chosen)} cannot be estimated: a task has {min(fewest)} decided samples")
    columns = ["tuned", "tasks of", "tasks"]
    columns += [f"pass@{k} {which}" for k in chosen for which in ("base", "tuned")]
    columns += ["SRR", "NDR", "SDS", "NSCR", "P", "E", "S", "O"]
    columns += [f"{name} {which}" for name in ("mean", "answer entropy", "length") for which in ("base", "tuned")]
    table = AnalysisTable(columns, notes=notes)
    for one in tuned:
        for part, members in parts_of(base, ids).items():
            table.rows.append([one.path.stem, part, len(members), *_cells(base.on(members), one.on(members), chosen)])
    if len(set(fewest)) > 1:
        table.notes.append(
            f"The fewest samples of a task are {', '.join(map(str, fewest))} (base, then tuned): the side with more "
            "solves more tasks by chance. P, E, S and O can be compared only where they are equal."
        )
    # From (1 - p) ** n = MISSED with log(1 - p) taken as -p, which for a few samples is above 1.
    unseen = min(1.0, -math.log(MISSED) / max(1, min(fewest)))
    table.notes.append(
        f"A right answer that no sample has shown has a probability below {unseen:.2g} with 95 % confidence."
    )
    return table


def _cells(base: Sequence[TaskResult], tuned: Sequence[TaskResult], ks: Sequence[int]) -> list[float | int | None]:
    cells: list[float | int | None] = []
    for k in ks:
        cells += [_pass_at(base, k), _pass_at(tuned, k)]
    counts = SupportCounts.of(base, tuned)
    cells += [counts.retention, counts.discovery, counts.dynamic_score, counts.net_change]
    cells += [counts.preserved, counts.expanded, counts.shrunk, counts.neither]
    cells += [mean(column([t.score for t in of])) for of in (base, tuned)]
    cells += [mean(column([t.answer_entropy for t in of])) for of in (base, tuned)]
    cells += [length_of(of) for of in (base, tuned)]
    return cells


def _pass_at(task_results: Sequence[TaskResult], k: int) -> float | None:
    return mean(column([t.pass_at(k) for t in task_results]))


def length_of(task_results: Sequence[TaskResult]) -> float | None:
    """Mean tokens of a sample; greedy responses, which no other column counts, are left out."""
    samples = sum(t.responses - t.greedy_responses for t in task_results)
    tokens = sum(t.tokens - t.greedy_tokens for t in task_results)
    return float(np.divide(tokens, samples)) if samples else None
