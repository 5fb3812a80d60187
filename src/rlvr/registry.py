"""Names -> components: one mechanism for all kinds, from verifiers and rewards to losses, samplers and engines.

A component is a class or a function. In the configuration it is written as a name, as `FILE.py:Name` or `module:Name`,
or as a mapping `{name: ..., option: value}`. Its options are its own signature: the parameters of a class, the
keyword-only parameters of a function. They are checked and converted by their annotations before anything runs.

Names are found, in this order: what was registered in this process, the library's own packages (imported on first use),
and entry points of installed packages (group `rlvr.verifiers`, `rlvr.losses` ...: the kind in the plural).

A file is loaded once, under a name of its own, with its folder at the end of the module search path. A script that
trains without `if __name__ == "__main__":` is loaded as far as its first GRPOTrainer, so that its components are found
and it does not train again.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import operator
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from rlvr.core.calling import FIELDS
from rlvr.core.component import FILE_MODULE, Component, adapted
from rlvr.core.specs import ComponentSpec, SpecLike
from rlvr.errors import USER_CODE_ERRORS, ConfigError, RlvrError, nearest, user_traceback

if TYPE_CHECKING:
    # Slow to import, and needed only where a component is built from a configuration: `import rlvr.verifiers` is quick.
    import importlib.metadata

    from pydantic import TypeAdapter

T = TypeVar("T")

PACKAGES = {
    "verifier": "rlvr.verifiers.builtin",
    "reward": "rlvr.rewards",
    "selector": "rlvr.selection",
    "advantage": "rlvr.advantages",
    "modifier": "rlvr.advantages",
    "loss": "rlvr.losses",
    "kl": "rlvr.losses",
    "correction": "rlvr.losses",
    "auxiliary": "rlvr.losses",
    "token_selector": "rlvr.losses",
    "source": "rlvr.data",
    "sampler": "rlvr.data",
    "plan": "rlvr.rollout",
    "environment": "rlvr.rollout",
    "engine": "rlvr.rollout",
    "backend": "rlvr.distributed",
    "optimizer": "rlvr.policy",
    "stage": "rlvr.stages",
    "preset": "rlvr.recipes",
}
"""Kind of component -> the package whose import registers the library's own components of that kind."""

_components: dict[str, dict[str, Any]] = {kind: {} for kind in PACKAGES}

_loading: list[Path] = []
"""Files that are being loaded for their components, the innermost last."""


class _TrainerReached(BaseException):
    """A script that is loaded for its components makes a trainer. It is no Exception, so that the script does not catch
    it."""


def register(kind: str, name: str) -> Callable[[T], T]:
    """Decorator: make a class or function known as `name` among the components of `kind`.

    Registering another object under a taken name raises ConfigError; registering it again from a re-run notebook cell,
    or from a file that is loaded under a second name, replaces it.
    """
    if kind not in PACKAGES:
        raise ConfigError(f"there is no kind of component {kind!r}{nearest(kind, PACKAGES)}")

    def keep(component: T) -> T:
        old = _components[kind].get(name)
        # By file and qualified name, not by identity: a notebook cell that is run again makes a new object of the same
        # source.
        if old is not None and _source(old) != _source(component):
            raise ConfigError(f"the {kind} {name!r} is taken by {'.'.join(_identity(old))}: choose another name")
        # The library's own components are checked by its tests; importing the contracts here would be circular for
        # them.
        if not _is_own(component):
            from rlvr.core.component_checks import refuse_misspelt

            importlib.import_module(PACKAGES[kind])  # with the contract of the kind
            refuse_misspelt(kind, component)
        _components[kind][name] = component
        return component

    return keep


def _identity(component: Any) -> tuple[str, str]:
    return getattr(component, "__module__", ""), getattr(component, "__qualname__", repr(component))


def _is_own(component: Any) -> bool:
    """Tell whether a component is the library's."""
    # With the dot: a user's package may be called `rlvr_ideas`.
    return _identity(component)[0].startswith("rlvr.")


def _source(component: Any) -> tuple[str, str]:
    """The file of a component, or its module where that has no file, and its qualified name."""
    module, name = _identity(component)
    loaded = sys.modules.get(module)
    if loaded is None:
        file = None
    else:
        file = vars(loaded).get("__file__")
    return (module if file is None else str(Path(file).resolve())), name


def registered_outside() -> Iterator[tuple[str, str, Any]]:
    """(kind, name, component) of everything that was registered in this process and is not the library's own."""
    for kind, components in _components.items():
        for name, component in components.items():
            if not _is_own(component):
                yield kind, name, component


def own_name(kind: str, component: Any) -> str | None:
    """The name by which the library itself registers `component`; None where it does not."""
    importlib.import_module(PACKAGES[kind])
    if not _is_own(component):
        return None
    return next((name for name, registered in _components[kind].items() if registered is component), None)


def is_in_words(written: Any) -> bool:
    """Tell whether a value of a configuration only describes what was given in Python (`<a lambda>`)."""
    return isinstance(written, str) and written.startswith("<") and written.endswith(">")


def refuse_words(what: str, written: Any) -> None:
    """ConfigError where `written`, the value of `what`, describes what was given in Python and cannot be found
    again."""
    if is_in_words(written):
        raise ConfigError(
            f"{what}: the run was given {written[1:-1]}, in Python, and a file cannot say where that is: give "
            f"another {what}"
        )


def names(kind: str) -> list[str]:
    """The names that `kind` is known by in this process, the library's own included."""
    # Registering is a side effect of the import, so the list is complete only after it.
    importlib.import_module(PACKAGES[kind])
    return sorted(set(_components[kind]) | {entry.name for entry in _entry_points(kind)})


def _entry_points(kind: str) -> importlib.metadata.EntryPoints:
    import importlib.metadata

    # `rlvr.losses`, `rlvr.advantages`; the plural of a kind that ends in s would take `es`.
    return importlib.metadata.entry_points(group=f"rlvr.{kind}{'es' if kind.endswith('s') else 's'}")


def find(kind: str, name: str) -> Any:
    """The class or function that `name` stands for; ConfigError with the nearest name when there is none."""
    if not isinstance(name, str):
        raise ConfigError(f"a {kind} is written as a name, not {name!r}")
    refuse_words(kind, name)
    if ":" in name:
        # `ideas/loss.py:Clip` is a file, `ideas.loss:Clip` a module.
        if name.split(":")[0].endswith(".py"):
            return _from_file(kind, name)
        return _from_module(kind, name)
    if name not in _components[kind]:
        importlib.import_module(PACKAGES[kind])
    if name not in _components[kind]:
        # Last, so that no installed package can replace a name of the library's in silence.
        for entry in _entry_points(kind):
            if entry.name == name:
                return _from_package(kind, entry)
        raise ConfigError(f"there is no {kind} {name!r}{nearest(name, names(kind))}")
    return _components[kind][name]


def _from_package(kind: str, entry: importlib.metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # importing someone else's package may raise anything
        raise ConfigError(
            f"{kind} {entry.name!r}: {entry.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _from_file(kind: str, name: str) -> Any:
    file, _, attribute = name.rpartition(":")
    return _attribute(kind, name, _file_module(f"{kind} {name!r}", file), attribute)


def _from_module(kind: str, name: str) -> Any:
    module_name, _, attribute = name.rpartition(":")
    return _attribute(kind, name, _named_module(f"{kind} {name!r}", module_name), attribute)


def _attribute(kind: str, name: str, module: ModuleType, attribute: str) -> Any:
    try:
        # `attrgetter`, since the attribute may be a path: `FILE.py:Class.method`.
        target = operator.attrgetter(attribute)(module)
    except AttributeError:
        target = None
    if not callable(target):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        place = vars(module).get("__file__") or module.__name__
        raise ConfigError(
            f"{kind} {name!r}: {place} has no class or function {attribute!r}{nearest(attribute, public)}"
        )
    return target


def import_components(files: Sequence[str]) -> None:
    """Import files (`FILE.py`) and modules, which register their components. ConfigError names the one that cannot
    be."""
    for file in files:
        refuse_words("imports", file)
        if file.endswith(".py"):
            _file_module(f"imports: {file!r}", file)
        else:
            _named_module(f"imports: {file!r}", file)


def _named_module(what: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except USER_CODE_ERRORS as error:
        raise ConfigError(f"{what}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error


def _file_module(what: str, file: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}")
    # Two files of one name in different folders are two modules. The hash need not be the same in another process: each
    # loads the file by its path.
    module_name = f"{FILE_MODULE}{path.stem}_{abs(hash(str(path))):x}"
    try:
        return sys.modules.get(module_name) or load_file(module_name, path)
    except USER_CODE_ERRORS as error:  # SystemExit too: a script may end by sys.exit()
        raise ConfigError(f"{what}: {path} cannot be imported: {type(error).__name__}: {error}") from error


def load_file(module_name: str, path: Path) -> ModuleType:
    """The file `path` as the module `module_name`, up to where it makes a trainer. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before the file runs, as importlib does it: dataclasses and pickle look their module up by name.
    sys.modules[module_name] = module
    if (
        str(path.parent) not in sys.path
    ):  # at the end, so that nothing is hidden: Python itself puts a script's folder first
        sys.path.append(str(path.parent))
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    # BaseException, which the script's own `except Exception` lets pass.
    except _TrainerReached:
        pass  # what is defined above is there
    except BaseException:
        # A half-loaded module would be taken for a whole one by the next component of the file.
        del sys.modules[module_name]
        raise
    finally:
        _loading.pop()
    return module


def leave_loaded_script() -> None:
    """End the loading of a script, where one is being loaded for its components: it has come to where it would
    train."""
    if _loading:
        raise _TrainerReached(str(_loading[-1]))


def check_options(kind: str, spec: SpecLike) -> dict[str, Any]:
    """The options of a component as written, checked and converted by the component's own signature."""
    from pydantic import ValidationError

    from rlvr.core.component_checks import refuse_two_contracts, refuse_without_base

    spec = ComponentSpec.parse(spec)
    name = spec.name
    options = dict(spec.options)
    component = find(kind, name)
    importlib.import_module(PACKAGES[kind])  # with the contract of the kind
    if not (inspect.isclass(component) or inspect.isroutine(component) or isinstance(component, functools.partial)):
        raise ConfigError(
            f"{kind} {name!r} is a {type(component).__name__}: name a class, with its options, or a function"
        )
    refuse_without_base(kind, name, component)
    refuse_two_contracts(kind, component)
    accepted = options_of(component)
    for option in options:
        if option not in accepted:
            raise ConfigError(f"{kind} {name!r} has no option {option!r}{nearest(option, accepted)}")
    for option, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"{kind} {name!r} needs the option {option!r}")
    hints = _hints(component)
    for option, value in options.items():
        # An option without an annotation is passed on as it is written.
        if option in hints:
            try:
                options[option] = _adapter(hints[option]).validate_python(value)
            except ValidationError as error:
                # The first one: of a union the others are about types that the value is not.
                problem = error.errors()[0]
                reason = problem["msg"].removeprefix("Value error, ")
                raise ConfigError(f"{kind} {name!r}: {option}={value!r}: {reason}") from error
    return options


def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import BaseModel, ConfigDict, TypeAdapter

    if typing.get_origin(hint) is typing.Annotated:
        held = typing.get_args(hint)[0]
    else:
        held = hint
    # pydantic refuses a second configuration for types that bring their own.
    has_config = isinstance(held, type) and (
        issubclass(held, BaseModel) or typing.is_typeddict(held) or dataclasses.is_dataclass(held)
    )
    if has_config:
        return TypeAdapter(hint)
    # A number that is not finite is a slip in every option: it would only be seen in the loss.
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def options_of(component: Any) -> dict[str, inspect.Parameter]:
    """Return what may be given as an option: the keyword-only parameters of a function; all parameters of a class,
    except those that its attribute `injected` names."""
    parameters = inspect.signature(component).parameters
    # A function's positional parameters are the call's own (a batch, a completion), never options.
    kinds: list[Any] = [inspect.Parameter.KEYWORD_ONLY]
    if inspect.isclass(component):
        kinds.append(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if inspect.isclass(component):
        injected = component.injected if issubclass(component, Component) else ()
    else:
        # Of a plain reward function, the fields that it asks for by name are given by the library, too.
        injected = FIELDS
    return {name: p for name, p in parameters.items() if p.kind in kinds and name not in injected}


def _hints(component: Any) -> dict[str, Any]:
    whole = not inspect.isclass(component) or "__init__" not in vars(component) or dataclasses.is_dataclass(component)
    # A class without an `__init__` of its own, as a dataclass, has the annotations of its fields.
    owner = component if whole else component.__init__  # a dataclass's inherited fields are found in their own modules
    try:
        hints = typing.get_type_hints(owner, include_extras=True)
        if inspect.isclass(component) and owner is not component:
            hints = {**typing.get_type_hints(component, include_extras=True), **hints}
        return hints
    # An annotation that is imported under TYPE_CHECKING alone cannot be looked up: no option is converted then.
    except NameError:
        return {}


def build(kind: str, spec: SpecLike) -> Any:
    """The component that `spec` writes: an instance of a class, or a function with its options bound."""
    from rlvr.core.component_checks import check_members, refuse_misspelt

    name = ComponentSpec.parse(spec).name
    component = find(kind, name)
    options = check_options(kind, spec)
    refuse_misspelt(kind, component)
    if not inspect.isclass(component):
        made = adapted(kind, functools.partial(component, **options) if options else component)
    else:
        made = instance(kind, name, adapted(kind, component), options)
        # Once more, for members that `__init__` sets on the instance.
        refuse_misspelt(kind, made)
    check_members(kind, name, made)
    return made


def instance(kind: str, name: str, component: type, options: Mapping[str, Any]) -> Any:
    """Make an instance of the class `component`. ConfigError says what it refuses, with the user's lines where their
    code fails."""
    try:
        return component(**options)
    # What constructors raise for a wrong value, in words; of any other exception the user needs the line.
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from error
    except RlvrError:
        raise
    except USER_CODE_ERRORS as error:  # the user's code: its own lines, not ours
        raise ConfigError(f"{kind} {name!r} cannot be made. What it raised:\n{user_traceback(error)}") from error


register_verifier = functools.partial(register, "verifier")
register_reward = functools.partial(register, "reward")
register_selector = functools.partial(register, "selector")
register_advantage = functools.partial(register, "advantage")
register_modifier = functools.partial(register, "modifier")
register_loss = functools.partial(register, "loss")
register_sampler = functools.partial(register, "sampler")
register_plan = functools.partial(register, "plan")
register_stage = functools.partial(register, "stage")
