"""Files that recipes train on and that no public set has in their form: made from public sets or from samples of the
policy, or described.

`python -m rlvr.recipes prepare SLUG` writes those of a recipe, as JSONL in the folder that its configuration names. A
file that is there is left as it is. How each is made lies beside its recipe: a module with `rows()`, which yields
`(place, row)` and raises DataError for a set that has other columns than it reads.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.config.config_loading import load_config
from rlvr.data.files import Placed
from rlvr.data.row_adapters import to_task
from rlvr.errors import ConfigError, DataError
from rlvr.monitor.whole_file import whole_file
from rlvr.recipes.hub_schemas import hub_schemas, named_data
from rlvr.recipes.papers import Paper


def prepare(paper: Paper, limit: int | None = None, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Write the files of a recipe that are not there, each with at most `limit` rows; yield a line about each.

    `overrides` are `key.path=value` settings of the configuration, for files that its model samples. ConfigError, with
    a row of the file, for one that is not made here; DataError for a public set that cannot be read.
    """
    config = load_config(paper.tree, overrides)
    names = files_of(config)
    if not names:
        yield f"{paper.slug} reads public sets alone: nothing has to be prepared"
    for name in names:
        path = Path(name)
        if path.exists():
            yield f"{name} is there, and is left as it is"
        elif (module := maker(name)) is not None:
            rows = importlib.import_module(f"rlvr.recipes.{module}").rows(config)
            count = _write(path, rows, limit)
            yield f"{name}: {count} rows written"
        else:
            raise ConfigError(yours_to_make(name))


def files_of(config: Config) -> list[str]:
    """The files that a recipe's configuration names and that no hub has."""
    return [name for name in named_data(config) if name in hub_schemas()["files"]]


def refuse_missing_files(slug: str, config: Config) -> None:
    """ConfigError for a file of the recipe `slug` that `config` reads and that is not there: it says how it is made."""
    for name in files_of(config):
        if Path(name).exists():
            continue
        if maker(name) is not None:
            raise ConfigError(
                f"{slug} trains on {name}, which is not there: `python -m rlvr.recipes prepare {slug}` makes it"
            )
        raise ConfigError(yours_to_make(name))


def yours_to_make(name: str) -> str:
    """The message about a file that only its user can make."""
    schema = hub_schemas()["files"][name]
    row = json.dumps(schema["rows"][0], ensure_ascii=False)
    return f"{name} is not there and is yours to make: {schema['make']}. A row of it: {row}"


def maker(name: str) -> str | None:
    """The module of rlvr.recipes that makes the file `name`; None for one that its user makes."""
    module: str | None = hub_schemas()["files"][name].get("maker")
    return module


def _write(path: Path, rows: Iterator[Placed], limit: int | None) -> int:
    """Write the rows; the number of rows. DataError for a row that is no task,
    and where there is none."""
    count = 0
    with whole_file(path) as file:
        for place, row in itertools.islice(rows, limit):
            to_task(row, place=place)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
        if not count:
            raise DataError(f"no row of {path} could be made: the set that it is made from gave none")
    return count


def column(row: dict[str, Any], name: str, place: str) -> Any:
    """A column of a public set. DataError, with the columns that are there, where it has none of this name."""
    if name not in row:
        raise DataError(f"{place} has no column {name!r} (it has {', '.join(sorted(row))}): the set has changed")
    return row[name]
