"""From what a trainer was given in Python to a configuration that the commands can read: names for objects, files for
tasks.

Invariants: nothing that is recorded loads as something else: an object is written by a name only where that name leads
to it, and with the options that it was made with. Other objects are described in words,
`<a lambda (train.py, line 3)>`, which `registry.refuse_words` refuses where they are used.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import logging
import operator
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any

from rlvr import registry
from rlvr.config import Config
from rlvr.config.config_loading import TASK_FILES
from rlvr.core.own_files import set_aside
from rlvr.core.specs import ComponentSpec
from rlvr.data.samplers import fingerprint_of
from rlvr.monitor.whole_file import write_whole
from rlvr.policy.foreign import foreign
from rlvr.records import Task
from rlvr.verifiers.base import FunctionVerifier, Verifier

log = logging.getLogger(__name__)

# A choice: it bounds what a run adds to the disk without being asked. Above it the configuration describes the tasks in
# words, with their fingerprint.
LARGEST = 100_000_000
"""Bytes of a file of tasks in the run folder, about 100,000 prompts of 200 tokens: a copy of more is the user's to
decide on."""


DATA_FILE = "data.json"
"""The file of a run folder with the number and the hash of the tasks of each stage."""


class _NotWritableError(Exception):
    """An object that a configuration cannot write; the text says what it is."""


@dataclass
class GivenObjects:
    """Objects given to a trainer beside its configuration, to be recorded in the run folder `path`.

    `specs` are its `tasks` and `eval_tasks` as given, under `train` and `eval`, None where the configuration names
    them; `tasks` those that are to be kept (`kept_in_folder`), `further_verifiers` those of a list of rewards but the
    first, and `verifiers` the names that tasks of the run name. Everything is put into words or text on first use.
    """

    config: Config
    model: Any = None
    verifier: Any = None
    specs: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    verifiers: Collection[str] = ()
    further_verifiers: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The run's data: by stage and split the number of tasks, their fingerprint (`fingerprint_of`) and
    where they come from."""

    @functools.cached_property
    def tree(self) -> dict[str, Any]:
        """The configuration of the run with what was given in it, as plain YAML types."""
        tree = self.config.dump()
        if self.model is not None:
            tree["model"] |= {"path": _model_path(self.model), "scratch": None}
        if self.verifier is not None:
            tree["verifier"] = verifier_as_written(self.verifier)
            self._for_all_stages(tree, "verifier")
        for name, verifier in self.further_verifiers.items():
            tree["verifiers"][name] = verifier_as_written(verifier)
            self._for_all_stages(tree, "verifiers", name)
        # `None` keeps what the configuration names; objects replace it, in the stages too.
        for split, spec in self.specs.items():
            if spec is not None:
                tree["data"][split] = self._data_as_written(split, spec)
                self._for_all_stages(tree, "data", split)
        # Any text may be the name of a component. One that is not costs an import more, which does no harm.
        named = {*texts_of(tree), *self.verifiers}
        tree["imports"] = list(dict.fromkeys([*tree["imports"], *_registering(named)]))
        return tree

    @staticmethod
    def _for_all_stages(tree: dict[str, Any], *path: str) -> None:
        """Take the overrides of `path` out of the stages: what was given holds for all of them."""
        for stage in tree["stages"]:
            sections = [stage]
            for key in path[:-1]:
                sections = [section[key] for section in sections if isinstance(section.get(key), dict)]
            for section in sections:
                section.pop(path[-1], None)

    def _data_as_written(self, split: str, spec: Any) -> Any:
        if split not in self.tasks:  # a file, a hub name, a source
            return spec
        if self._texts[split] is None:
            tasks = self.tasks[split]
            return (
                f"<{len(tasks)} tasks as objects (fingerprint {fingerprint_of(tasks)}), more than {LARGEST // 10**6} "
                "MB, which are not kept>"
            )
        return _spec_in_folder(self.config, split)

    @property
    def files(self) -> list[str]:
        """The names of the files of tasks that belong in the run folder."""
        return [TASK_FILES[split] for split in self.tasks]

    @functools.cached_property
    def _texts(self) -> dict[str, str | None]:
        """The files of tasks by split; None for one that would be too large."""
        return {split: _lines(tasks) for split, tasks in self.tasks.items()}

    def write_tasks(self) -> None:
        """Write data.json and the files of tasks into the run folder. Another file of such a name is renamed first."""
        files = {DATA_FILE: json.dumps(self.facts, indent=1, default=repr) + "\n"}
        files |= {TASK_FILES[split]: text for split, text in self._texts.items() if text is not None}
        for name, text in files.items():
            path = self.config.folder / name
            # The same tasks as before, as in a resume: the file keeps its time of change.
            if path.is_file() and path.read_bytes() == text.encode():
                continue
            # `lexists`, so that a link that leads nowhere is renamed, too, and not written through.
            if os.path.lexists(path):
                log.warning("%s holds other tasks; it is kept as %s", path, set_aside(path))
            write_whole(path, text)


def kept_in_folder(config: Config, split: str, argument: Any) -> bool:
    """Return True if the tasks of a split belong in the run folder: given as objects, or read from the file there.

    The latter are those of an earlier run of the name, which is moved aside where the new one overwrites it.
    """
    # A path, a hub name or a mapping can be written into config.yaml as it is; a list or a Dataset cannot.
    if argument is not None:
        return not _is_plain(argument, (str, dict))
    return bool(written_data(config, split) == _spec_in_folder(config, split))


def written_data(config: Config, split: str) -> Any:
    """The data set of a split as the configuration writes it."""
    return config.data.train if split == "train" else config.data.eval


def _spec_in_folder(config: Config, split: str) -> dict[str, Any]:
    """The data set that a file of the run folder is: tasks as they were, whatever the fields of other files are
    called."""
    return {"path": str(config.folder / TASK_FILES[split]), "fields": {}, "source": ""}


def verifier_as_written(verifier: Any) -> Any:
    """A verifier, class or function as a configuration writes it: a name, a mapping with options, or words in `<>`."""
    try:
        return _component(verifier)
    except _NotWritableError as error:
        return f"<{error}>"


def _component(value: Any) -> Any:
    """The component `value` as written. _NotWritableError where nothing that is written leads to it."""
    if _is_plain(value, (str, dict)):
        return value
    if isinstance(value, ComponentSpec):
        return value.written
    if isinstance(value, Mapping):  # with objects among its options
        return _value(value)
    if isinstance(value, FunctionVerifier):
        return _component(value.call.function)
    if isinstance(value, functools.partial):
        return _partial(value)
    if isinstance(value, (type, FunctionType)):
        return registry.own_name("verifier", value) or _name(value)
    return _instance(value)


def _partial(value: functools.partial[Any]) -> Any:
    accepted = registry.options_of(value.func)
    # A configuration has options by keyword only, so a positional argument has no place in it.
    if value.args or not set(value.keywords) <= set(accepted):
        raise _NotWritableError(
            f"a functools.partial of {_called(value.func)}, which binds more than keyword-only parameters"
        )
    return _with_options(_component(value.func), {name: _value(bound) for name, bound in value.keywords.items()})


def _instance(value: Any) -> Any:
    """An object by its class and the options that it was made with, where it keeps them under their names."""
    kind = type(value)
    # An object of a class with `__slots__` has none.
    kept = getattr(value, "__dict__", {})
    options = {}
    for name, parameter in registry.options_of(kind).items():
        if name not in kept:
            raise _NotWritableError(
                f"an object of class {kind.__qualname__}, which does not keep its option {name!r} as an attribute"
            )
        # `==` only between plain values: a numpy array, say, compares element by element.
        if kept[name] is parameter.default or (_is_plain(kept[name]) and kept[name] == parameter.default):
            continue
        try:
            options[name] = _value(kept[name])
        except _NotWritableError as error:
            raise _NotWritableError(f"an object of class {kind.__qualname__} with {name}={error}") from error
    return _with_options(_component(kind), options)


def _with_options(component: Any, options: dict[str, Any]) -> Any:
    if not options:
        return component
    if isinstance(component, str):
        return {"name": component, **options}
    return {**component, **options}


def _value(value: Any) -> Any:
    """An option in plain YAML types; a verifier or function in it as a component."""
    if isinstance(value, enum.Enum):
        return _value(value.value)
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return _flat({key: _value(item) for key, item in value.items()})
    if callable(value) or isinstance(value, Verifier):
        return _component(value)
    raise _NotWritableError(f"an object of class {type(value).__qualname__}")


def _flat(written: dict[str, Any]) -> dict[str, Any]:
    """A mapping whose `name` was an object with options (a part of a combination), with these options beside the other
    keys."""
    named = written.get("name")
    if not isinstance(named, dict):
        return written
    rest = {key: value for key, value in written.items() if key != "name"}
    if twice := named.keys() & rest.keys():
        raise _NotWritableError(f"{named['name']}, whose option {min(twice)!r} is also a key beside its name")
    return named | rest


def _is_plain(value: Any, kinds: tuple[type, ...] = (str, int, float, bool, list, dict, type(None))) -> bool:
    """Return True if `value` is of plain YAML types through and through, and itself of one of `kinds`."""
    if type(value) not in kinds:
        return False
    try:
        # The round trip finds what JSON changes in silence: keys that are no text, and tuples inside lists.
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _name(value: Any) -> str:
    """`FILE.py:Name` or `module:Name`, which leads to the class or function `value`."""
    if value.__name__ == "<lambda>":
        raise _NotWritableError(f"a lambda ({_line(value)})")
    if "<locals>" in value.__qualname__:
        raise _NotWritableError(f"{value.__name__}, which is defined inside a function ({_line(value)})")
    place = importable(value.__module__)
    if place is None:
        raise _NotWritableError(f"{value.__name__}, which is defined in a notebook or at a prompt")
    try:
        named = operator.attrgetter(value.__qualname__)(sys.modules[value.__module__])
    except AttributeError:
        named = None
    # Another object has the name now: a decorator replaced the function, or the notebook cell was run again.
    if named is not value:
        raise _NotWritableError(f"{value.__qualname__} ({_line(value)}), which is not what {place} has by that name")
    return f"{place}:{value.__qualname__}"


def importable(module_name: str) -> str | None:
    """A loaded module as another process imports it: `FILE.py`, or a dotted name in a package; None for a notebook."""
    module = sys.modules.get(module_name)
    if module is None:
        return None
    file = vars(module).get("__file__")
    spec = vars(module).get("__spec__")
    # Modules of a package may use relative imports, so that only the dotted name can be imported elsewhere.
    if vars(module).get("__package__"):
        # `python -m package.module` runs the module as `__main__`; its spec has the name.
        if module_name == "__main__" and spec is not None:
            return str(spec.name)
        return module_name
    # A script, or a file beside it that it imports: other processes do not have its folder on their path.
    if file is not None and Path(file).suffix == ".py" and Path(file).is_file():
        path = Path(file).resolve()
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    if module_name == "__main__":
        return None
    return module_name


def _registering(named: set[str]) -> Iterator[str]:
    """The files and modules that registered components whose names are in `named`; words for what is of a notebook."""
    for kind, name, component in registry.registered_outside():
        if name in named:
            module_name = getattr(component, "__module__", "")
            yield importable(module_name) or f"<the {kind} {name!r}, which a notebook or a prompt registered>"


def texts_of(tree: Any) -> Iterator[str]:
    """Every text among the values of a tree."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (dict, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from texts_of(value)


def _model_path(model: Any) -> str:
    """The name that a model was loaded by, or words. An adapter on it would be lost, so that this is put in words."""
    kind = type(model).__qualname__
    # Its `_name_or_path` is that of the base model, which would be evaluated without the adapter.
    if hasattr(model, "peft_config"):
        return f"<a model with an adapter ({kind})>"
    name = foreign(foreign(model, "config"), "_name_or_path", "")  # where transformers keeps it
    if name:
        return str(name)
    return f"<a model as an object ({kind})>"


def _lines(tasks: Sequence[Task]) -> str | None:
    """Tasks as JSON lines; None where that is more than LARGEST bytes."""
    lines = []
    size = 0
    for task in tasks:
        lines.append(json.dumps(task.to_json(), ensure_ascii=False) + "\n")
        size += len(lines[-1].encode())
        if size > LARGEST:
            return None
    return "".join(lines)


def _called(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _line(value: Any) -> str:
    """File and line of a function or class, as far as they are known."""
    try:
        file = inspect.getsourcefile(value)
        return f"{Path(str(file)).name}, line {inspect.getsourcelines(value)[1]}"
    except (OSError, TypeError):
        return f"of {value.__module__}"
