"""The tasks that a run trains on and is evaluated on: a limit, and its seed."""

from __future__ import annotations

import datasets

from rlvr.config import Config
from rlvr.run.run_tasks import TaskSets


def test_a_limit_draws_with_its_own_seed_in_training_and_in_evaluation():
    rows = [{"id": f"t{i}", "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(200)]
    tasks = TaskSets(rows, rows)

    def drawn(data, evaluation):
        config = Config(data=data, evaluation=evaluation, run={"steps": 1})
        return [[task.id for task in got] for got in (tasks.training(config), tasks.evaluation(config))]

    def split(size, seed):
        return set(datasets.Dataset.from_list(rows).train_test_split(train_size=size, seed=seed)["train"]["id"])

    trained, evaluated = drawn({"limit": 20, "limit_seed": 42}, {"limit": 10, "limit_seed": 7})
    assert set(trained) == split(20, 42) and set(evaluated) == split(10, 7)
    # A stage without a limit may inherit the seed: it takes all, in their order.
    trained, evaluated = drawn({"limit": None, "limit_seed": 42}, {"limit": 2})
    assert trained == [row["id"] for row in rows] and evaluated == ["t0", "t1"]
