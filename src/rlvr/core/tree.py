"""The configuration as a plain tree: reading YAML, dotted overrides, and laying one tree over another.

Functions of dicts and lists; what the keys mean is rlvr.config's business.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlvr.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with two rules of YAML 1.2: `1e-6` is a number (not text), and `off` is text (not false)."""


# PyYAML follows YAML 1.1: `yes`, `no`, `on` and `off` are booleans there. Console `off` would be false.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Matches `true`, `True`, `TRUE`; not `yes`, `on`, `tRUE`. The last argument lists the first characters to try it
# for.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
# Matches `1e-6`, `+3E5` and `1.0e6`, which YAML 1.1 takes for text since they lack a point, or the exponent's sign;
# `1.0e-6` it knows already.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


_INDEX = re.compile(r"\[ *(\d+) *\]")

_FastLoader: Any = type(
    "_FastLoader",
    (getattr(yaml, "CSafeLoader", yaml.SafeLoader),),
    {"yaml_implicit_resolvers": _Loader.yaml_implicit_resolvers},
)
"""The same in C where PyYAML has it, nine times as fast. It also takes a tab after a colon, and drops a byte order mark
inside the text."""


def read_yaml(text: str, name: str) -> Any:
    """Return the value that `text` writes; yaml.YAMLError, which says where in `name`, when it is none, and when a
    mapping has a key twice."""
    with contextlib.suppress(yaml.YAMLError, ValueError):
        return _value(_FastLoader(text))
    # The errors of the loader in Python have the name and fuller words.
    loader = _Loader(text)
    loader.name = name
    return _value(loader)


def _value(loader: Any) -> Any:
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated_keys(node)
        return loader.construct_document(node)
    finally:
        # Clears the references of the parser to itself, which else wait for the garbage collector.
        loader.dispose()


def _refuse_repeated_keys(root: yaml.Node) -> None:
    """yaml.YAMLError where a mapping has a key twice: YAML forbids it, and PyYAML takes the last value silently."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        # An alias stands for a node that was looked at; it may be its own ancestor.
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            waiting += (key, value)
            # `<<` may stand several times, once for each mapping that is merged.
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            identity = (key.tag, key.value)
            if identity in lines:
                problem = f"the key {key.value!r} is written twice, first in line {lines[identity]}: keep one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[identity] = key.start_mark.line + 1


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. ConfigError, in one line with the place of the fault, where there is none in
    it."""
    restore = "correct it, or restore the file from a copy"
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        tree = read_yaml(text, str(path))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark:
            place = f", line {mark.line + 1}, column {mark.column + 1}"
        else:
            place = ""
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{path}{place}: it is not YAML ({problem}): {restore}") from error
    except yaml.reader.ReaderError as error:  # a file of zero bytes, as a power cut leaves it, has no marks
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}, line {line}: it is not YAML ({error.reason}): {restore}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: it is not YAML (no UTF-8 text: {error.reason}): {restore}") from error
    except (ValueError, RecursionError) as error:  # a date that does not exist; brackets by the thousand
        raise ConfigError(f"{path}: it is not YAML ({error}): {restore}") from error
    if tree is None:
        raise ConfigError(f"{path} is empty, and a config is a mapping of sections: {restore}")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, not {type(tree).__name__}: {restore}")
    return tree


def as_tree(override: str) -> dict[str, Any]:
    """The tree that `key.path=value` writes, its value in YAML. ConfigError when it is not of that form."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        # `rlvr evaluate runs/mine`, where the run is the value of an option.
        hint = " (a file or folder is the value of an option: see --help)" if os.path.exists(override) else ""
        raise ConfigError(f"the override {override!r} is not of the form key.path=value{hint}")
    try:
        # `run.name=` is an empty text, where YAML would give null.
        value = read_yaml(text, override) if text.strip() else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"the value in {override!r} is not YAML: {error}") from error
    # Messages write `stages[1].optim.lr`, which may be given back.
    return nested(_INDEX.sub(r".\1", key.strip()), value)


def nested(path: str, value: Any) -> dict[str, Any]:
    """The tree with one value: `a.b`, 1 -> {"a": {"b": 1}}."""
    # From the inside out.
    *outer, last = path.split(".")
    tree = {last: value}
    for part in reversed(outer):
        tree = {part: tree}
    return tree


def merge(base: Any, over: Any, path: tuple[str, ...] = ()) -> Any:
    """`over` laid over `base`, both trees that stand at `path`: mappings key by key, everything else replaced.

    A component's mapping that names another component replaces the old one whole, since its options belong to the old
    name; a mapping of options over a bare name keeps that name. A scheduled or driven number over a word replaces it. A
    mapping of numbers over a list changes those items of it (`stages.0.steps=3`); ConfigError where there is none of
    that number.
    """
    if isinstance(base, list) and isinstance(over, Mapping) and over and all(str(key).isdigit() for key in over):
        return _items(base, over, path)
    is_component = path != ("run",)  # the run has a name of its own; any other mapping with a name is a component
    # A schedule (`schedule` or `at`) or a controller (`metric`) over `micro_batch_tokens: auto`, say, has no `name`.
    is_number = isinstance(over, Mapping) and any(key in over for key in ("schedule", "at", "metric"))
    if isinstance(base, str) and isinstance(over, Mapping) and over and "name" not in over and not is_number:
        base = {"name": base}
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        # Copied, so that a tree that is changed later does not change the preset that it came from.
        return copy.deepcopy(over)
    if is_component and "name" in over and base.get("name", over["name"]) != over["name"]:
        return copy.deepcopy(dict(over))
    return {**base, **{key: merge(base.get(key), value, (*path, key)) for key, value in over.items()}}


def _items(base: list[Any], over: Mapping[Any, Any], path: tuple[str, ...]) -> list[Any]:
    items = list(base)
    for key, value in over.items():
        if int(key) >= len(items):
            place = ".".join((*path, str(key)))
            raise ConfigError(
                f"{place}: there are {len(items)} items, numbered from 0; write the whole list to add one"
            )
        items[int(key)] = merge(items[int(key)], value, (*path, str(key)))
    return items
