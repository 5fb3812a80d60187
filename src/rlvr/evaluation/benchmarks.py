"""Benchmarks by name: tasks with the prompts, the verifier and the sampling that their authors publish.

They lie in benchmarks.yaml beside this file, each with the place where prompt and sampling were read and with what
differs here. A benchmark is data: the data set, texts with columns of its rows in braces, and settings of the
evaluation.

Invariant: the ids of a benchmark's tasks are its name and the row's number, from the hub and from a file alike.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from rlvr.data.row_adapters import to_task
from rlvr.data.sources import open_rows
from rlvr.errors import ConfigError, DataError, nearest
from rlvr.records import Task

FILE = Path(__file__).with_name("benchmarks.yaml")


class Benchmark(BaseModel):
    """One benchmark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    data: str
    """The data set, as `data.eval` writes it."""
    ask: str
    """The user message, with columns of the row in braces, in the form of `str.format`: `{question}`, `{tests[0]}`. A
    list stands as its lines; `{instruction}` is `instruction`, `{A}` to `{D}` the options in the order shown."""
    instruction: str = ""
    begin: str = ""
    """The begin of the assistant's answer, which the model continues; empty: it opens its own."""
    answer: str | None = None
    """The reference answer, written as `ask` is; None: what the layout of the rows says (rlvr.data.row_adapters)."""
    options: tuple[str, ...] = ()
    """The options of a question, written as `ask` is, the right one first."""
    stop: tuple[str, ...] = ()
    """Texts that end a response."""
    difficulty: str = "difficulty"
    """The column that says how difficult a task is."""
    verifier: str
    evaluation: Mapping[str, Any]
    """Settings of `evaluation` in the configuration: samples, temperature, length."""
    source: str
    """The places where prompt and sampling were read: repository, commit and file."""
    differs: str = ""
    """Differences from the source; empty: none that is known."""


@functools.cache
def benchmarks() -> dict[str, Benchmark]:
    """Name -> benchmark."""
    written: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: Benchmark(name=name, **entry) for name, entry in written.items()}


def find_benchmarks(written: Iterable[str]) -> dict[str, tuple[Benchmark, str]]:
    """Name -> benchmark and data set of the words `NAME[=DATA]`, several of them separated by commas.

    Raises ConfigError for an unknown name, with the nearest one and all names, and for one that stands twice.
    """
    known = benchmarks()
    found: dict[str, tuple[Benchmark, str]] = {}
    for word in (part.strip() for words in written for part in words.split(",")):
        name, _, data = word.partition("=")
        if name not in known:
            hint = nearest(name, known)
            # Without a near name the hint is the list already.
            if "did you mean" in hint:
                hint += f" (there are {', '.join(known)})"
            raise ConfigError(f"there is no benchmark {name!r}{hint}; other tasks are evaluated with --data")
        if name in found:
            raise ConfigError(f"the benchmark {name} is asked for twice")
        found[name] = known[name], data or known[name].data
    return found


def with_benchmark(tree: Mapping[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """A resolved configuration with the prompt, the verifier and the sampling of a benchmark in place of its own.

    Options of the tokenizer's chat template stay, and so does the begin of the answer that a run was trained with.
    """
    template = tree["data"]["template"]
    kept = None
    if isinstance(template, Mapping) and template.get("text") is None:
        kept = {key: template[key] for key in ("assistant", "options") if template.get(key)} or None
    # A benchmark that begins the answer leaves no place for another begin.
    if benchmark.begin and kept is not None:
        kept.pop("assistant", None)
    evaluation = {"greedy": True, "samples": 0, "k": [1], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {
        **tree,
        "data": {**tree["data"], "template": kept or None, "fields": None},
        "rollout": {**tree["rollout"], "stop": list(benchmark.stop), "ignore_eos": False},
        # The tasks name theirs.
        "verifier": None,
        "verifiers": {},
        "evaluation": {
            **tree["evaluation"],
            **evaluation,
            "limit": None,
            "difficulty": benchmark.difficulty,
            **benchmark.evaluation,
        },
    }


def benchmark_tasks(benchmark: Benchmark, data: str | None = None) -> list[Task]:
    """The tasks of a benchmark from its data set, or from `data` with rows of the same columns, in order.

    Raises DataError for a data set that cannot be read, is empty, or has a row without a column that the benchmark
    needs; the message names the row.
    """
    rows, _ = open_rows(data or benchmark.data)
    order = random.Random(0)
    tasks = []
    for number, (place, row) in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{place}: a row of {benchmark.name} is an object with columns")
        # Drawn for every row, so that the order of one does not depend on the others.
        shown = order.sample(range(len(benchmark.options)), len(benchmark.options))
        tasks.append(_task(benchmark, dict(row), shown, place, number))
    if not tasks:
        raise DataError(f"{data or benchmark.data} is empty: there is no task of {benchmark.name} in it")
    return tasks


def _task(benchmark: Benchmark, row: dict[str, Any], shown: list[int], place: str, number: int) -> Task:
    slots: dict[str, Any] = {column: _written(value) for column, value in row.items()}
    slots["instruction"] = benchmark.instruction
    fill = functools.partial(_fill, slots=slots, place=place, benchmark=benchmark)
    options = [fill(text) for text in benchmark.options]
    slots |= {chr(ord("A") + place): options[index] for place, index in enumerate(shown)}
    prompt = [{"role": "user", "content": fill(benchmark.ask)}]
    if benchmark.begin:
        prompt.append({"role": "assistant", "content": benchmark.begin})
    if options:
        task = to_task({"prompt": prompt, "answer": 0, "info": {"options": options, "order": shown}}, place=place)
    elif benchmark.answer is not None:
        task = to_task({"prompt": prompt, "answer": fill(benchmark.answer), "info": row}, place=place)
    else:
        # Tests, instructions or a reference that a layout of the library finds in the row.
        task = to_task(row, place=place)
    own_id = f"{benchmark.name}/{number}"
    return replace(
        task, prompt=prompt, demonstration=None, id=own_id, source=benchmark.name, verifier=benchmark.verifier
    )


class _Lines(list[str]):
    """A column that is a list: its entries by number, and as a whole its lines."""

    def __format__(self, spec: str) -> str:
        return "\n".join(self)


def _written(value: Any) -> Any:
    # numpy's arrays, as a parquet file gives lists.
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return _Lines(str(one).strip() for one in value)
    return str(value).strip()


def _fill(text: str, slots: Mapping[str, Any], place: str, benchmark: Benchmark) -> str:
    try:
        return text.format_map(slots)
    except (KeyError, IndexError) as error:
        has = ", ".join(name for name in slots if name != "instruction")
        raise DataError(
            f"{place}: there is no column {error.args[0]!r}, which the benchmark {benchmark.name} has (the row has "
            f"{has})"
        ) from error
