"""From a YAML file and overrides to a checked Config, and what is wrong with one in words."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rlvr import registry
from rlvr.config import Config
from rlvr.config.peer_names import peer_answer, unknown_leaves
from rlvr.core.command_name import program
from rlvr.core.specs import ComponentSpec, WrittenSpec
from rlvr.core.tree import as_tree, merge, read_mapping
from rlvr.core.validation_words import reason
from rlvr.errors import ConfigError, nearest

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""The published recipes: the recipe with the slug SLUG is FOLDER/SLUG.yaml in this folder."""

SHARED = Path(sys.prefix) / "share" / "rlvr"
"""The folder that the wheel puts `configs` and `examples` into; a checkout has these beside it."""

TASK_FILES = {"train": "tasks.jsonl", "eval": "eval_tasks.jsonl"}
"""The files of a run folder that hold the tasks which a trainer was given as objects."""


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, in a published recipe or in a mapping, with `key.path=value` overrides.

    Raises ConfigError that lists every wrong key and value, with the nearest name for an unknown key.
    """
    return make_config(config_tree(source, overrides))


def config_tree(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The configuration that `load_config` reads, as it is written. ConfigError where a file cannot be read."""
    if source is None or isinstance(source, Mapping):
        tree = dict(source or {})
    else:
        path = config_file(source)
        # The file may be the config.yaml of a run folder that was moved: its tasks lie beside it.
        tree = with_tasks_of(path.parent, read_mapping(path))
    tree.pop("recipe", None)  # what a published recipe says of itself: rlvr.recipes.papers
    for override in overrides:
        tree = merge(tree, as_tree(override))
    return tree


def with_imports(tree: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """The configuration with these files and modules imported too, in the place of what a notebook registered, for
    which a run's configuration has words."""
    written = tree.get("imports") or []
    return {**tree, "imports": [*(one for one in written if not registry.is_in_words(one)), *files]}


def recipe_files() -> dict[str, Path]:
    """Slug -> file of every published recipe."""
    return {path.stem: path for path in sorted(RECIPES.glob("*/*.yaml"))}


def config_file(name: str | Path) -> Path:
    """The file with this path, the one that the wheel has under it (`configs/quickstart.yaml`), or else the file of the
    published recipe with this slug. ConfigError if there is none."""
    path = Path(name)
    # An absolute path stays what it is: joined to another, it replaces it.
    for candidate in (path, SHARED / path):
        if candidate.is_file():
            return candidate
    recipes = recipe_files()
    if str(name) in recipes:
        return recipes[str(name)]
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: give a YAML file, or the name of a published recipe")
    missing = f"there is no config file {path} (looked in {Path.cwd()})"
    # `configs/mine.yaml` is meant as a file.
    if path.suffix or len(path.parts) > 1:
        raise ConfigError(missing)
    suggestion = nearest(str(name), recipes, f"; `{program('recipes')}` lists them")
    raise ConfigError(f"{missing}, and no published recipe of this name{suggestion}")


def with_tasks_of(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the run in `folder`, with the tasks that lie there: the folder may have been moved or copied
    since."""
    run = tree.get("run")
    data = tree.get("data")
    if not isinstance(run, dict) or not isinstance(data, dict):
        return tree
    written = Path(str(run.get("dir", "")), str(run.get("name", "")))
    moved = {
        split: {**data[split], "path": str(folder / file)}
        for split, file in TASK_FILES.items()
        if isinstance(data.get(split), dict) and data[split].get("path") == str(written / file)
    }
    return {**tree, "data": {**data, **moved}}


def make_config(tree: Mapping[str, Any], where: str = "") -> Config:
    """Validate a tree; ConfigError lists what is wrong, each with its path."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = "\n".join(f"  {where}{line}" for line in problems(error))
        raise ConfigError(f"the configuration is wrong:\n{lines}") from error


def problems(error: ValidationError, root: type[BaseModel] | None = None) -> Iterator[str]:
    """Every problem once, as `key.path: what is wrong`.

    Of a value that may be one of several types, the problems with the nearest type are reported: one that has its
    keys.
    """
    by_place: dict[tuple[str | int, ...], dict[str, list[tuple[tuple[bool, bool], str]]]] = {}
    # pydantic reports a problem for each type of a union. `rank` sorts out the types that the value was hardly meant
    # for: those of which it is not even a mapping (the path ends at the choice), then those that do not know its keys.
    for problem in error.errors():
        place = _place(problem["loc"], root or Config)
        rank = (place.path == place.choice, problem["type"] == "extra_forbidden")
        members = by_place.setdefault(place.path if place.choice is None else place.choice, {})
        members.setdefault(place.member, []).extend((rank, line) for line in _in_words(problem, place))
    for members in by_place.values():
        best = min(
            members.values(),
            key=lambda lines: ([sum(r) for r in zip(*(rank for rank, _ in lines), strict=True)], len(lines)),
        )
        # Types of one union may say the same in the same words.
        yield from dict.fromkeys(line for _, line in best)


def _in_words(problem: Any, place: _Place) -> Iterator[str]:
    where = _written_path(place.path)
    if problem["type"] == "extra_forbidden":
        # A configuration of verl has whole sections that are unknown here: each of their keys is answered.
        for path in unknown_leaves(where, problem["input"]):
            yield f"{path}: unknown key{_suggestion(path, str(place.path[-1]), place.keys)}"
        return
    if problem["type"] == "invalid_key":  # `{lr: 4,0e-3}` is lr: 4, and a key `0e-3`
        section = _written_path(place.path[:-1])
        yield f"{section}: a key is text; a number has a decimal point, and a comma begins the next key"
        return
    why = reason(problem)
    if problem["type"] not in ("value_error", "missing"):
        why += f", not {problem['input']!r}"
    if place.is_component and problem["type"] in ("string_type", "dict_type"):
        why = f"a name is needed, or a mapping with a `name`, not {problem['input']!r}"
        if place.path == ("verifier",) and isinstance(problem["input"], list):
            why += "; several verifiers are one: {name: combine, parts: [...]}"
    yield f"{where}: {why}" if where else why


def _written_path(path: Iterable[str | int]) -> str:
    """`rewards[1].weight`, as messages write a place."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _suggestion(path: str, key: str, known: list[str]) -> str:
    """The answer to an unknown key: our name of what TRL and verl call so, or the nearest key of its section."""
    if "." in key and key.partition(".")[0] in known:
        return "; a path of keys is an override (key.path=value): in a mapping write sections inside each other"
    answer = peer_answer(path)
    if answer is not None:
        return f", {answer}"
    return nearest(key, known)


@dataclass(frozen=True)
class _Place:
    """The path of a wrong key, without the names of types that pydantic puts between the keys."""

    path: tuple[str | int, ...]
    keys: list[str]
    """The keys of the section that the last part of the path is in."""
    choice: tuple[str | int, ...] | None = None
    """The path of the value that may be one of several types, if there is one,"""
    member: str = ""
    """and the type that the problem is about."""
    is_component: bool = False
    """True where the value is a component: a name, or a mapping."""


def _place(location: Iterable[str | int], root: type[BaseModel]) -> _Place:
    hint: Any = root
    path: list[str | int] = []
    keys: list[str] = []
    choice = None
    member = ""
    is_component = False
    for part in location:
        members = _members(hint)
        if len(members) > 1:  # the part is the name of one of the types
            named = [m for m in members if getattr(m, "__name__", "") == part]
            hint = (named or [None])[0]
            choice = tuple(path)
            member = str(part)
            is_component = members == _members(WrittenSpec)
            continue
        hint = members[0]
        path.append(part)
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            keys = list(hint.model_fields)
            if part in hint.model_fields:
                hint = hint.model_fields[str(part)].annotation
            else:
                hint = None
        else:
            # An item of a list or the value of a mapping: the last type argument of `list[X]` and of `dict[str, X]`.
            hint = (get_args(hint) or [None])[-1]
    return _Place(tuple(path), keys, choice, member, is_component and choice == tuple(path))


def _members(hint: Any) -> list[Any]:
    """The types that a value may be of, None apart."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for one in get_args(hint) if one is not type(None) for member in _members(one)]
    if isinstance(hint, type) and issubclass(hint, ComponentSpec):
        return _members(WrittenSpec)
    return [hint]
