"""Data sets -> lists of tasks: `load_tasks`, which takes a data set however it is written.

- a string, looked for in this order: a registered source (`arithmetic`, `FILE.py:function`), a file (`.jsonl`, `.json`,
  `.parquet`, relative to the working directory), a folder with a file per split (`FOLDER` or `FOLDER:SPLIT`), a data
  set of the Hugging Face hub (`ORG/NAME`, `ORG/NAME:SPLIT`, `ORG/NAME/CONFIG:SPLIT`, also `...:train[:100]`)
- `{path: STRING, split:, config:, revision:, fields:, source:, limit:}`: one of these with options; `source: ''` gives
  tasks that name no source none
- `{name: SOURCE, option: value}`: a registered source, a function that returns an iterable of tasks
- a `datasets.Dataset` (of a `DatasetDict`, the split)
- a list of tasks (Task, row, or a string that is a prompt) or of several of the above, which are concatenated. A string
  in a list is a data set where it is a source, a hub name, a single word, ends like a file of tasks or begins like a
  path; else it is a prompt (`{prompt: STRING}` is never in doubt)

Invariants: ids are unique in what is returned, and a data set without tasks is refused. A source is registered with
`register("source", NAME)`; its options are its keyword-only parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlvr import registry
from rlvr.core.hub_retries import without_retry_lines
from rlvr.core.specs import ComponentSpec, SpecLike
from rlvr.data.code import NoTestsError
from rlvr.data.files import SPLITS, SUFFIXES, read_rows, split_files
from rlvr.data.images import refuse_images
from rlvr.data.row_adapters import check_field_map, check_json, task_id, to_task
from rlvr.errors import DataError, nearest
from rlvr.records import Task

log = logging.getLogger(__name__)

# Matches `gsm8k` and `my-tasks.v2`; not `What is 2+2?`, which is a prompt.
_WORD = re.compile(r"[\w.-]+", re.ASCII)
"""A word alone in a list is a name, so that a mistyped one is refused; a prompt of one word is written
`{prompt: word}`."""
# Matches `openai/gsm8k`, `openai/gsm8k/main`, `openai/gsm8k/main:train[:100]`; not `gsm8k`, and not `1/2 + 1/3 = ?`.
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(:(?P<split>.+))?")

TaskSource = str | Mapping[str, Any] | Iterable[Any]
"""A data set, in one of the forms above."""

PlacedTask = tuple[str, Task]
T = TypeVar("T")


class MissingDataError(DataError):
    """A file or folder of tasks that is not there."""


@dataclass(frozen=True)
class _DataSet:
    """A file, folder or hub data set, as the mapping `{path: ...}` writes it."""

    path: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    fields: Mapping[str, Any] | None = None
    source: str | None = None
    limit: int | None = None


def load_tasks(
    spec: TaskSource, *, split: str = "train", fields: Mapping[str, Any] | None = None, limit: int | None = None
) -> list[Task]:
    """The tasks of `spec` (see the module), in order, at most `limit` (1 or more; None: all).

    `split` and `fields` (our name -> column) hold where a spec says nothing else. A repeated id is refused; of rows
    without an id that have the same prompt, reference and demonstration one is kept, and the log says how many were
    dropped. It also counts the tasks with the prompt of an earlier one and another reference, which are all kept.
    DataError names the file, line or row, the field and the fix.
    """
    tasks: dict[str, PlacedTask] = {}
    dropped = 0
    # Before anything is read: 0 or a negative number would read the whole data set.
    _checked_limit(limit)
    for place, task in _open(spec, split, fields):
        if task.id not in tasks:
            tasks[task.id] = place, task
            if len(tasks) == limit:
                break
        # The id is the hash of the content, so the two rows ask the same. Any other id was given by the data, and
        # twice.
        elif task.id == task_id(task.prompt, task.answer, task.info, task.source, task.demonstration):
            dropped += 1
        else:
            raise DataError(
                f"the task id {task.id!r} is given twice, at {tasks[task.id][0]} and at {place}: make ids unique"
            )
    if dropped:
        log.warning(
            "%d rows that repeat an earlier row's prompt, answer and demonstration were dropped (%d kept)",
            dropped,
            len(tasks),
        )
    _report_asked_twice(tasks.values())
    return [task for _, task in tasks.values()]


def check_written(spec: Any, fields: Mapping[str, Any] | None = None) -> None:
    """DataError or ConfigError where a data set is written wrong, in what can be seen without reading it: options, the
    field map, options of a source."""
    if fields:
        check_field_map(fields)
    if isinstance(spec, _hub_types()):
        return
    if isinstance(spec, Mapping):
        spec = _with_path(spec)
        if "name" in spec:
            registry.check_options("source", spec)
            # Some sources are made from another data set.
            if _is_own(spec) and "data" in spec:
                check_written(spec["data"])
        else:
            made = _as_data_set(spec, "train", None)
            if made.fields:
                check_field_map(made.fields)
            _checked_limit(made.limit)
    elif isinstance(spec, (list, tuple)):
        for item in spec:
            if _is_spec(item, fields):
                check_written(item)
    elif not isinstance(spec, str):
        raise _no_data_set(spec)


def is_here(spec: Any, fields: Mapping[str, Any] | None = None) -> bool:
    """True where a data set is read from files, from what is written, or by the library's own sources: neither the hub
    nor a function of the user's is asked."""
    if isinstance(spec, (list, tuple)):
        return all(is_here(item, fields) for item in spec if _is_spec(item, fields))
    if isinstance(spec, Mapping):
        spec = _with_path(spec)
        if "path" not in spec:
            return _is_own(spec) and is_here(spec.get("data", []))
        spec = spec["path"]
    if not isinstance(spec, str) or registry.is_in_words(spec):
        return False
    if _is_registered(spec):
        return is_here({"name": spec})
    folder = spec.rpartition(":")[0]
    return any(Path(place).expanduser().exists() for place in (spec, folder) if place) or not _of_hub(spec)


def _is_own(spec: Mapping[str, Any]) -> bool:
    """True where a mapping names a source of the library's."""
    name = str(spec.get("name"))
    return ":" not in name and registry.own_name("source", registry.find("source", name)) is not None


def _report_asked_twice(tasks: Iterable[PlacedTask]) -> None:
    """Log how many tasks have the prompt of an earlier one and another reference, with the first two places."""
    first: dict[str, PlacedTask] = {}
    pairs = []
    for place, task in tasks:
        # Without a reference nothing contradicts, such as demonstrations of one prompt.
        if task.answer is None:
            continue
        prompt = task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt)
        earlier, other = first.setdefault(prompt, (place, task))
        # Another `info` may make another question of the same words: a template may name its fields.
        if other.answer != task.answer and other.info == task.info:
            pairs.append((earlier, place))
    if pairs:
        log.warning(
            "%d tasks have the prompt of an earlier task and another answer, such as those at %s and %s; all are kept",
            len(pairs),
            *pairs[0],
        )


def limited(tasks: list[T], limit: int | None, seed: int | None) -> list[T]:
    """`limit` of the tasks (or of other rows) in their order, all where it is None or larger: the first ones without a
    seed (0 or more).

    With a seed the same tasks are drawn as `datasets.Dataset.train_test_split(train_size=limit, seed=seed)` puts into
    its training part (huggingface/datasets 5.2.0, src/datasets/arrow_dataset.py): the last `limit` of a permutation by
    `numpy.random.default_rng(seed)`.
    """
    if limit is None or seed is None or limit >= len(tasks):
        return tasks[:limit]
    drawn = np.random.default_rng(seed).permutation(len(tasks))[-limit:]
    return [tasks[index] for index in sorted(drawn.tolist())]


def _open(spec: Any, split: str, fields: Mapping[str, Any] | None) -> Iterator[PlacedTask]:
    """The tasks of `spec` with their places, read as they are asked for."""
    if isinstance(spec, str):
        registry.refuse_words("data set", spec)
        if _is_registered(spec):
            return _registered(spec, fields)
        return _data_set(_DataSet(spec, split, fields=fields))
    # Before Mapping, which a DatasetDict is, too.
    if isinstance(spec, _hub_types()):
        chosen: Any = spec
        if isinstance(spec, Mapping):
            if split not in spec:
                raise DataError(f"the data set has no split {split!r}{nearest(split, spec)}")
            chosen = spec[split]
        return _filled("the data set", _adapted(_indexed("dataset", chosen), fields, None))
    if isinstance(spec, Mapping):
        return _open_mapping(spec, split, fields)
    if isinstance(spec, (list, tuple)):
        return _filled("the list of tasks", _open_list(spec, split, fields))
    raise _no_data_set(spec)


def _no_data_set(spec: Any) -> DataError:
    return DataError(
        f"a data set is a path, a hub name, a source, a datasets.Dataset or a list of tasks, not {type(spec).__name__}"
    )


def _open_mapping(spec: Mapping[str, Any], split: str, fields: Mapping[str, Any] | None) -> Iterator[PlacedTask]:
    spec = _with_path(spec)
    if "name" in spec:
        return _registered(spec, fields)
    return _data_set(_as_data_set(spec, split, fields))


def _with_path(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with a `path` in the place of a `name` that is one: options laid over a path or hub name by an
    override."""
    name = str(spec.get("name", ""))
    if {"/", "."} & set(name) and ".py:" not in name:
        return {"path": name, **{key: value for key, value in spec.items() if key != "name"}}
    return spec


def _as_data_set(spec: Mapping[str, Any], split: str, fields: Mapping[str, Any] | None) -> _DataSet:
    """The data set that a mapping with a `path` writes."""
    options = {field.name for field in dataclasses.fields(_DataSet)}
    for key in spec:
        if key not in options:
            # `{train: ROWS, test: ROWS}`; a mapping with a path is one data set.
            if "path" not in spec and isinstance(spec[key], (list, tuple, Mapping, *_hub_types())):
                raise DataError(f"a mapping of several data sets ({key!r}, ...) is not taken: give one of them")
            raise DataError(
                f"the data set {reprlib.repr(dict(spec))} has no option {key!r}{nearest(str(key), options)}"
            )
    if not isinstance(spec.get("path"), str):
        written = reprlib.repr(dict(spec))
        raise DataError(f"a data set written as a mapping needs a `path` or the `name` of a source: {written}")
    for key in ("split", "config", "revision", "source"):
        if not isinstance(spec.get(key, ""), str | None):
            raise DataError(f"the option {key!r} of the data set {spec['path']!r} is text, not {spec[key]!r}")
    return _DataSet(**{"split": split, "fields": fields, **spec})


def _open_list(items: Iterable[Any], split: str, fields: Mapping[str, Any] | None) -> Iterator[PlacedTask]:
    for number, item in enumerate(items):
        if _is_spec(item, fields):
            yield from _open(item, split, fields)
        else:
            place = f"tasks[{number}]"
            yield place, _as_task(item, place, fields, None)


def _is_spec(item: Any, fields: Mapping[str, Any] | None) -> bool:
    """Return True if an item of a list is a data set (else it is one task)."""
    if isinstance(item, str):
        file = item.partition(":")[0]
        named = file.endswith(SUFFIXES) or file.startswith(("./", "../", "~/", "/")) or _HUB_NAME.fullmatch(item)
        return bool(named) or bool(_WORD.fullmatch(item)) or _is_registered(item)
    if isinstance(item, Mapping):
        # The column of the map, or that in which it is (`meta.question`).
        mapped = str((fields or {}).get("prompt"))
        asks = {"prompt", "question", "messages", mapped, mapped.partition(".")[0]}
        # A row may have a column `name` or `path`; one that has a question is a task.
        return bool({"name", "path"} & set(item)) and not asks & set(item)
    return isinstance(item, _hub_types())


def _is_registered(spec: str) -> bool:
    file, colon, _ = spec.partition(":")
    return bool(colon and file.endswith(".py")) or spec in registry.names("source")


def _registered(spec: SpecLike, fields: Mapping[str, Any] | None) -> Iterator[PlacedTask]:
    name = ComponentSpec.parse(spec).name
    made = registry.build("source", spec)
    items = made() if callable(made) else made
    return _filled(f"the source {name!r}", _adapted(_indexed(name, items), fields, name))


def _data_set(spec: _DataSet) -> Iterator[PlacedTask]:
    rows, source = open_rows(spec.path, spec.split, spec.config, spec.revision)
    tasks = _adapted(rows, spec.fields, source if spec.source is None else spec.source)
    return itertools.islice(_filled(spec.path, tasks), _checked_limit(spec.limit))


def open_rows(
    written: str, split: str = "train", config: str | None = None, revision: str | None = None
) -> tuple[Iterator[tuple[str, Any]], str]:
    """The rows of a file, a folder or a hub data set with their places, read as they are asked for, and the name of the
    set. DataError where there is none."""
    path = Path(written).expanduser()
    folder, colon, last = written.rpartition(":")
    # `FOLDER:SPLIT`. A file or folder whose own name holds a colon goes first.
    if not path.exists() and colon and Path(folder).expanduser().is_dir():
        path = Path(folder).expanduser()
        split = last
    if path.is_dir():
        return itertools.chain.from_iterable(map(read_rows, split_files(path, split))), path.resolve().name
    if path.is_file():
        # `gsm8k/train.jsonl` is of the source `gsm8k`, not `train`.
        source = path.resolve().parent.name if path.stem in SPLITS else path.stem
        return read_rows(path), source
    hub = _of_hub(written)
    if hub is None:
        raise _no_file(written)
    return hub_rows(hub["name"], config or hub["config"], hub["split"] or split, revision), hub["name"]


def _of_hub(written: str) -> re.Match[str] | None:
    """The parts of a name of the hub; None of what can only be a file.

    `data/train.jsonl` has the form of such a name, and is a file that is missing: the network is not asked.
    """
    if Path(written).suffix in SUFFIXES or written.startswith(("./", "../", "~")):
        return None
    return _HUB_NAME.fullmatch(written)


def _no_file(path: str) -> MissingDataError:
    named = _near_file(Path(path).expanduser())
    if not named and not path.endswith(SUFFIXES):
        named += f", it is no registered source{nearest(path, registry.names('source'))}"
    if not {"/", "."} & set(path):
        named += f". Of a list of tasks, each is a mapping: {{'prompt': {path!r}}}"
    return MissingDataError(f"there is no data at {path!r}: no such file or folder in {Path.cwd()}{named}")


def _near_file(path: Path) -> str:
    """`; did you mean 'FILE'?`, of a file in the same folder; nothing where none has a name like that."""
    try:
        files = {str(path.with_name(file.name)) for file in path.parent.iterdir() if file.suffix in SUFFIXES}
    except (OSError, ValueError):  # no such folder, or none that may be read
        return ""
    return nearest(str(path), files, "")


def hub_rows(name: str, config: str | None, split: str, revision: str | None) -> Iterator[tuple[str, Any]]:
    """The rows of a data set of the hub with their places. DataError where it cannot be loaded."""
    import datasets

    try:
        with without_retry_lines():
            rows = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # the hub's client raises whatever its own network and file layers raise
        raise DataError(
            f"{name!r} is no file or folder in {Path.cwd()}, and as a hub data set (config {config}, split {split}) "
            f"it cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return _indexed(f"{name}:{split}", rows)


def _hub_types() -> tuple[type, ...]:
    """The classes of `datasets`, if anyone has imported it: nothing can be of them otherwise."""
    # The import takes seconds, and nothing can be of its classes where nobody has imported it.
    datasets = sys.modules.get("datasets")
    if datasets:
        return (datasets.Dataset, datasets.IterableDataset, datasets.DatasetDict)
    return ()


def _indexed(name: str, items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{number}]", item) for number, item in enumerate(items))


def _adapted(
    rows: Iterator[tuple[str, Any]], fields: Mapping[str, Any] | None, source: str | None
) -> Iterator[PlacedTask]:
    """The tasks of a data set's rows, less those of programming tasks without tests, which published sets have; they
    are counted."""
    without = 0
    for place, row in rows:
        try:
            task = _as_task(row, place, fields, source)
        except NoTestsError:
            without += 1
            if without == 1:
                log.warning("%s: left out, a programming task without test cases", place)
            continue
        yield place, task
    if without > 1:
        log.warning("left out for having no test cases: %d rows in all", without)


def _as_task(item: Any, place: str, fields: Mapping[str, Any] | None, source: str | None) -> Task:
    if isinstance(item, Task):
        refuse_images(item.info, item.prompt, place)
        check_json(item.to_json(), place)
        if item.source or not source:
            return item
        return dataclasses.replace(item, source=source)
    if isinstance(item, str):
        return to_task({"prompt": item}, place=place, source=source)
    return to_task(item, place=place, fields=fields, source=source)


def _filled(name: str, tasks: Iterator[PlacedTask]) -> Iterator[PlacedTask]:
    """`tasks`, refused by name if there is none."""
    # The first task is read here, so that an empty data set is named by the place that wrote it.
    first = next(tasks, None)
    if first is None:
        raise DataError(f"{name} is empty: there is no task in it")
    yield first
    yield from tasks


def _checked_limit(limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise DataError(f"a limit on tasks is a whole number of 1 or more, or null for all, not {limit!r}")
    return limit
