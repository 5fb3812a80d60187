"""Public schemas of the models and data sets that the recipes name, and of the files that a user makes for some.

They lie in hub_schemas.json beside this file, with the place where each was read, or `unseen` where it could not be
read and is assumed. `python -m rlvr.recipes show` says so; the tests build each recipe against them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.config.stage_plan import stage_plans
from rlvr.recipes.papers import Paper

FILE = Path(__file__).with_name("hub_schemas.json")


@functools.cache
def hub_schemas() -> dict[str, Any]:
    """The schemas by kind: `models` (each with one of `tokenizers`), `data` (sets of the hub) and `files` (of a user),
    by name. A file with a `maker` is made by that module of rlvr.recipes (`rlvr.recipes.prepare`)."""
    schemas: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return schemas


def named_data(config: Config) -> list[str]:
    """The hub data sets, without configuration and split, and the files that the stages of a configuration train or are
    evaluated on."""
    names: dict[str, None] = {}
    for plan in stage_plans(config):
        for spec in (plan.config.data.train, plan.config.data.eval, plan.config.evaluation.data):
            names |= dict.fromkeys(_names(spec))
    return list(names)


def _names(spec: Any) -> Iterator[str]:
    if isinstance(spec, str):
        if spec in hub_schemas()["files"]:
            yield spec
        else:
            # `ORG/NAME/CONFIG:SPLIT`
            yield "/".join(spec.partition(":")[0].split("/")[:2])
    elif isinstance(spec, list):
        for item in spec:
            yield from _names(item)
    elif isinstance(spec, dict):
        # A source that reads a data set (`preferences`) names it as `data`.
        yield from _names(spec.get("data", spec.get("path")))


def schema_lines(paper: Paper) -> list[str]:
    """The lines of `show` about the recipe's model and data: schemas that were not seen, files that a user makes."""
    schemas = hub_schemas()
    named = {
        name: schemas[kind].get(name)
        for kind, names in (("models", [paper.config.model.path]), ("data", named_data(paper.config)))
        for name in names
        if name not in schemas["files"]
    }
    lines = []
    for name, schema in named.items():
        if schema is None:
            lines.append(f"unseen: {name}: its schema has not been looked up")
        elif schema.get("unseen"):
            lines.append(f"unseen: {name}: its schema, or a part of it, is assumed ({schema['source']})")
    for name in named_data(paper.config):
        if name not in schemas["files"]:
            continue
        schema = schemas["files"][name]
        if "maker" in schema:
            lines.append(f"file: `python -m rlvr.recipes prepare {paper.slug}` makes {name}: {schema['make']}")
        else:
            lines.append(f"file: {name} is yours to make: {schema['make']}")
        if schema.get("unseen"):
            lines.append(f"unseen: {name}: its schema, or a part of it, is assumed ({schema['source']})")
        lines.append(f"  a row of it: {json.dumps(schema['rows'][0], ensure_ascii=False)}")
    return lines
