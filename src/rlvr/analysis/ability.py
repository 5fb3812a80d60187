"""The change of a model's results under help in the prompt (a plan, knowledge, a part of the solution), by difficulty,
and whether a tuned model's change differs from its base model's.

Wang et al. 2025, "Beyond Accuracy" (SPARKLE), arXiv 2506.04723: results with and without a plan or knowledge in the
prompt, by model, benchmark and level of difficulty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlvr.analysis.analysis_table import AnalysisTable, Evaluated, common_ids, metric_values, paired_change, parts_of
from rlvr.errors import ConfigError
from rlvr.evaluation.task_result import mean


def ability_table(evaluated: Mapping[tuple[str, str], Evaluated], metric: str = "mean") -> AnalysisTable:
    """A row for each part of the tasks, model and condition of `evaluated`, (model, condition) -> evaluation.

    The first condition is the prompt without help, the first model the one that the others are compared with. `change`
    is the paired difference to the model's own result without help; `beyond` is how much it exceeds the first model's.
    `metric` is `greedy`, `mean`, `pass@k`, `maj@k` or `best@k`. ConfigError where a model lacks a condition; DataError
    where the evaluations have no task in common, or none has the metric.
    """
    models = list(dict.fromkeys(model for model, _ in evaluated))
    conditions = list(dict.fromkeys(condition for _, condition in evaluated))
    missing = [f"{m}/{c}" for m in models for c in conditions if (m, c) not in evaluated]
    if missing:
        raise ConfigError(f"each model is compared under each condition; there is no result for {', '.join(missing)}")
    notes: list[str] = []
    ids = common_ids(list(evaluated.values()), notes)
    plain = conditions[0]
    columns = ["tasks of", "tasks", "model", "condition", metric, "change", "change 95 %"]
    notes.append(f"change: paired difference to the same model's {plain}, with its 95 % interval over tasks.")
    if len(models) > 1:
        columns += ["beyond", "beyond 95 %"]
        notes.append(f"beyond: this change minus that of {models[0]} on the same tasks.")
    table = AnalysisTable(columns, notes=notes)
    values = {key: metric_values(one, ids, metric) for key, one in evaluated.items()}
    place = {name: number for number, name in enumerate(ids)}
    for part, members in parts_of(next(iter(evaluated.values())), ids).items():
        where = [place[name] for name in members]
        for model in models:
            for condition in conditions:
                here = {key: value[where] for key, value in values.items()}
                cells = _cells(here, models, plain, model, condition)
                table.rows.append([part, len(members), model, condition, *cells])
    return table


def _cells(
    values: Mapping[tuple[str, str], np.ndarray], models: Sequence[str], plain: str, model: str, condition: str
) -> list[object]:
    value = values[model, condition]
    helped = condition != plain
    change = value - values[model, plain]
    cells: list[object] = [mean(value), *(paired_change(values[model, plain], value) if helped else (None, None))]
    if len(models) > 1:
        first = models[0]
        compared = helped and model != first
        of_first = values[first, condition] - values[first, plain]
        cells += paired_change(of_first, change) if compared else (None, None)
    return cells
