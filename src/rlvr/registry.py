"""The registry: finds and builds components of all kinds (verifiers, rewards, losses, samplers, engines ...) by name.

A component is a class or a function. The configuration names it as `name`, `FILE.py:Name` or `module:Name`, or as a
mapping `{name: ..., option: value}`. Its options are the parameters of its class, or the keyword-only parameters of its
function. They are checked and converted by their annotations before the run starts.

A plain name is looked up in this order: components registered in this process; the library's own components, whose
package is imported on first use, and those that a single paper uses; entry points of installed packages. The entry
point group of a kind is its plural: `rlvr.verifiers`, `rlvr.losses` ...

A file is loaded once in a process, as a module with a unique name, and its folder is appended to `sys.path`. A script
without `if __name__ == "__main__":` is executed only up to its first GRPOTrainer: its components are found, and it does
not start a second training run.
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
    # Slow to import, and needed only to build a component from a configuration: `import rlvr.verifiers` stays fast.
    import importlib.metadata

    from pydantic import TypeAdapter

Registered = TypeVar("Registered", bound=type[Any] | Callable[..., Any])
"""A class or a function: what a decorator registers, and returns as it is."""

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

RECIPES: dict[str, dict[str, str]] = {
    "advantage": {
        "conditional": "canon.conditional",
        "consistency": "copo.consistency",
        "mvar": "riskpo.risk",
        "prefix_tree": "tempo.prefix_tree",
    },
    "auxiliary": {
        "external_policy": "rl_plus.external_policy",
        "inverse_soft_q": "scalable_irl.inverse_soft_q",
        "last_token": "laser.last_token_loss",
        "leftover_lunch": "a_lol.leftover_lunch",
        "outcome_classifier": "implicit_prm.outcome_classifier",
    },
    "loss": {
        "clip_local_and_global": "copo.consistency",
        "copg": "copg.copg",
        "pacs": "pacs.pacs",
        "rover": "rover.rover",
        "topr": "topr.topr",
        "trajectory_balance": "for_.trajectory_balance",
    },
    "modifier": {
        "blend": "laser.laser",
        "confidence": "ucas.confidence",
        "external_member": "rl_plus.external_member",
        "noise": "noisy_verifier_corrections.noise",
        "signs": "psr.signs",
        "surprise": "rl_plus.surprise",
    },
    "plan": {
        "dars": "dars.dars",
    },
    "reward": {
        "adaptive_length_target": "laser_002_343.adaptive_length_target",
        "boxed_after_thinking": "laser_002_343.boxed_after_thinking",
        "boxed_in_thinking": "practical_two_stage_recipe.character_rewards",
        "brief_characters": "practical_two_stage_recipe.character_rewards",
        "by_condition": "autothink.autothink",
        "by_pass_rate": "grpo_lambda.by_pass_rate",
        "constraint_points": "light_if.constraint_points",
        "cosine_characters": "practical_two_stage_recipe.character_rewards",
        "cosine_length": "demystifying_long_cot.cosine_length",
        "exponential_length": "autothink.autothink",
        "last_token": "laser.laser",
        "no_thinking": "autothink.autothink",
        "phase_entropy": "pear.phase_entropy",
        "rank_overlap": "reasonrank.rank_overlap",
        "repeated_tokens": "demystifying_long_cot.repeated_tokens",
        "self_aligned": "sar.self_aligned",
        "spared_zero": "rlpr.spared_zero",
        "tagged_answer": "warm_up_before_you_train.tagged_answer",
    },
    "source": {
        "helped_problems": "sparkle.helped_problems",
    },
    "token_selector": {
        "covariance_softmax": "light_if.token_factors",
        "surprise_over_entropy": "light_if.token_factors",
    },
    "verifier": {
        "last_number": "sar.last_number",
        "shop_action": "shop_r1.shop_action",
        "toolrl": "toolrl.reference_calls",
    },
}
"""Kind -> name -> module in rlvr.recipes, for components that a single paper uses. They lie beside its recipe, and the
module is imported when the name is looked up."""

_components: dict[str, dict[str, Any]] = {kind: {} for kind in PACKAGES}

_loading: list[Path] = []
"""Stack of the files that `load_file` is executing; a file may load another one."""


class _TrainerReached(BaseException):
    """Ends the execution of a script by `load_file` at its first trainer. It is not an Exception, so that an
    `except Exception` of the script does not catch it."""


def register(kind: str, name: str) -> Callable[[Registered], Registered]:
    """Decorator: register a class or function as the component `name` of a kind.

    ConfigError if the name belongs to another component. A component of the same file and qualified name replaces the
    registered one: a notebook cell that is run again, or a file that is loaded under a second module name.
    """
    if kind not in PACKAGES:
        raise ConfigError(f"there is no kind of component {kind!r}{nearest(kind, PACKAGES)}")

    def keep(component: Registered) -> Registered:
        # A paper's component is registered only here, where its name is taken or found.
        if not _is_own(component):
            _import_recipe(kind, name)
        old = _components[kind].get(name)
        # By file and qualified name, not by identity: a notebook cell that is run again makes a new object of the same
        # source.
        if old is not None and _source(old) != _source(component):
            raise ConfigError(f"the {kind} {name!r} is taken by {'.'.join(_identity(old))}: choose another name")
        # Not for the library's own components, which its tests check: they would import their package while it is being
        # imported.
        if not _is_own(component):
            from rlvr.core.component_checks import refuse_misspelt

            importlib.import_module(PACKAGES[kind])  # with the contract of the kind
            refuse_misspelt(kind, component)
        _components[kind][name] = component
        return component

    return keep


def _identity(component: Any) -> tuple[str, str]:
    # None for a function that `exec` made in a namespace without a `__name__`.
    module = getattr(component, "__module__", None) or ""
    return module, getattr(component, "__qualname__", repr(component))


def _is_own(component: Any) -> bool:
    """Return True if a component is defined in this library."""
    # With the dot: a user's package may have a name such as `rlvr_ideas`.
    return _identity(component)[0].startswith("rlvr.")


def _source(component: Any) -> tuple[str, str]:
    """The file that defines a component (its module if there is no file) and its qualified name."""
    module, name = _identity(component)
    file = getattr(sys.modules.get(module), "__file__", None)
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
    """Return True if a value is the placeholder `<...>` that a saved configuration has for an object given in Python,
    such as `<a lambda (train.py, line 3)>`."""
    return isinstance(written, str) and written.startswith("<") and written.endswith(">")


def refuse_words(what: str, written: Any) -> None:
    """ConfigError if the value `written` of the key `what` is such a placeholder: the object cannot be restored from
    it."""
    if is_in_words(written):
        raise ConfigError(
            f"{what}: the run was given {written[1:-1]}, in Python, and a file cannot say where that is: give "
            f"another {what}"
        )


def names(kind: str) -> list[str]:
    """The names that `kind` is known by in this process, the library's own included."""
    # Registering is a side effect of the import, so the list is complete only after it.
    importlib.import_module(PACKAGES[kind])
    return sorted(set(_components[kind]) | set(RECIPES.get(kind, ())) | {entry.name for entry in _entry_points(kind)})


def _import_recipe(kind: str, name: str) -> None:
    """Register the component `name` of a single paper, if there is one."""
    module = RECIPES.get(kind, {}).get(name)
    if module is not None:
        importlib.import_module(f"rlvr.recipes.{module}")


# Kept, since each look reads the metadata of all installed packages, 27 ms of CPU for 300 of them.
@functools.cache
def _entry_points(kind: str) -> importlib.metadata.EntryPoints:
    import importlib.metadata

    # The plural of the kind: `rlvr.advantages`, `rlvr.losses`.
    return importlib.metadata.entry_points(group=f"rlvr.{kind}{'es' if kind.endswith('s') else 's'}")


def find(kind: str, name: str) -> Any:
    """The component that `name` stands for. ConfigError, with the most similar name, if there is none."""
    if not isinstance(name, str):
        raise ConfigError(f"a {kind} is written as a name, not {name!r}")
    refuse_words(kind, name)
    if ":" in name:
        # `ideas/loss.py:Clip` is a file, `ideas.loss:Clip` a module.
        place, _, attribute = name.rpartition(":")
        find_module = _file_module if name.split(":")[0].endswith(".py") else _named_module
        return _attribute(kind, name, find_module(f"{kind} {name!r}", place), attribute)
    if name.endswith(".py"):
        has = ", ".join(_own_names(_file_module(f"{kind} {name!r}", name))) or "no class or function"
        raise ConfigError(f"{kind} {name!r}: say which class or function of the file, {name}:NAME; it has {has}")
    if name not in _components[kind]:
        importlib.import_module(PACKAGES[kind])
        _import_recipe(kind, name)
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
    except Exception as error:  # the package's own code may raise anything
        raise ConfigError(
            f"{kind} {entry.name!r}: {entry.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _own_names(module: ModuleType) -> list[str]:
    """The classes and functions that the file defines; what it imports is left out."""
    own = [n for n, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)]
    return [n for n in own if vars(module)[n].__module__ == module.__name__ and not n.startswith("_")]


def _attribute(kind: str, name: str, module: ModuleType, attribute: str) -> Any:
    try:
        # Not `getattr`: the attribute may be dotted, as in `FILE.py:Class.method`.
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
    # The hash of the path tells files of the same name in different folders apart. It may differ between processes,
    # since each process loads the file by its path.
    module_name = f"{FILE_MODULE}{path.stem}_{abs(hash(str(path))):x}"
    try:
        return sys.modules.get(module_name) or load_file(module_name, path)
    except USER_CODE_ERRORS as error:  # including SystemExit: a script may call sys.exit()
        raise ConfigError(f"{what}: {path} cannot be imported: {type(error).__name__}: {error}") from error


def load_file(module_name: str, path: Path) -> ModuleType:
    """Execute the file `path` as the module `module_name`, up to its first trainer. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before the file is executed, as importlib does it: dataclasses and pickle look up the module by name.
    sys.modules[module_name] = module
    # Python puts a script's folder first. Here it comes last, so that its files shadow no other module.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    except _TrainerReached:
        pass  # the module keeps what the script defined above its trainer
    except BaseException:
        # Otherwise the next lookup in this file would find the incomplete module.
        del sys.modules[module_name]
        raise
    finally:
        _loading.pop()
    return module


def leave_loaded_script() -> None:
    """End the script that `load_file` is executing, if any. A trainer calls this first, before it starts a run."""
    if _loading:
        raise _TrainerReached(str(_loading[-1]))


def check_options(kind: str, spec: SpecLike) -> dict[str, Any]:
    """The options that `spec` gives, checked against the component's signature and converted by its annotations."""
    from pydantic import ValidationError

    from rlvr.core.component_checks import refuse_two_contracts, refuse_without_base, wrong_value

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
            # Beside the options, what the place takes: the `weight` of a reward.
            known = [*accepted, *spec.extra_keys]
            raise ConfigError(f"{kind} {name!r} has no option {option!r}{nearest(option, known)}")
    for option, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f"{kind} {name!r} needs the option {option!r}")
    for option, value in options.items():
        # An option without an annotation is passed on unchecked.
        if (adapter := _adapter(typing.cast(Any, component), option)) is not None:
            try:
                options[option] = adapter.validate_python(value)
            except ValidationError as error:
                raise ConfigError(f"{kind} {name!r}: {wrong_value(error, option, value)}") from error
    return options


# By component: as hints, `int | str` and `str | int` are equal. Bounded: a notebook defines its classes anew.
@functools.lru_cache(maxsize=1024)
def _adapter(component: Any, option: str) -> TypeAdapter[Any] | None:
    from pydantic import BaseModel, ConfigDict, TypeAdapter

    hint = _hints(component).get(option)
    if hint is None:
        return None
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    # pydantic refuses a `config` argument for types that can have a configuration of their own.
    has_config = isinstance(bare, type) and (
        issubclass(bare, BaseModel) or typing.is_typeddict(bare) or dataclasses.is_dataclass(bare)
    )
    if has_config:
        return TypeAdapter(hint)
    # NaN and infinities are refused: as an option they are mistakes, which would otherwise show only in the loss.
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))


def options_of(component: Any) -> dict[str, inspect.Parameter]:
    """The parameters that a configuration may set: those of a class, without the ones in its attribute `injected`; the
    keyword-only ones of a function, without `FIELDS`."""
    parameters = inspect.signature(component).parameters
    # The positional parameters of a function are the arguments of its call (a batch, a completion).
    parameter_kinds: list[Any] = [inspect.Parameter.KEYWORD_ONLY]
    if inspect.isclass(component):
        parameter_kinds.append(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        injected = component.injected if issubclass(component, Component) else ()
    else:
        # The library passes these to plain reward and verifier functions by name.
        injected = FIELDS
    return {name: p for name, p in parameters.items() if p.kind in parameter_kinds and name not in injected}


@functools.lru_cache(maxsize=1024)
def _hints(component: Any) -> dict[str, Any]:
    """The annotations of a component's parameters, evaluated; empty if one of them cannot be evaluated."""
    own_init = inspect.isclass(component) and "__init__" in vars(component) and not dataclasses.is_dataclass(component)
    # Of a dataclass, and of a class that inherits its `__init__`, the annotations of the class are read:
    # `get_type_hints` evaluates inherited ones in the module that defines them.
    owner = component.__init__ if own_init else component
    try:
        hints = typing.get_type_hints(owner, include_extras=True)
        if own_init:
            hints = {**typing.get_type_hints(component, include_extras=True), **hints}
        return hints
    # A name that is imported only under TYPE_CHECKING: no option of the component is converted.
    except NameError:
        return {}


def build(kind: str, spec: SpecLike) -> Any:
    """Build the component that `spec` names: an instance of its class, or its function with the options bound."""
    from rlvr.core.component_checks import check_members, refuse_misspelt

    name = ComponentSpec.parse(spec).name
    component = find(kind, name)
    options = check_options(kind, spec)
    refuse_misspelt(kind, component)
    if not inspect.isclass(component):
        made = adapted(kind, functools.partial(component, **options) if options else component)
    else:
        made = instance(kind, name, adapted(kind, component), options)
        # Again, for members that `__init__` sets on the instance.
        refuse_misspelt(kind, made)
    check_members(kind, name, made)
    return made


def instance(kind: str, name: str, component: type, options: Mapping[str, Any]) -> Any:
    """Make an instance of the class `component`. If the constructor raises, ConfigError with the message of a TypeError
    or ValueError, or with the user's traceback for other exceptions."""
    try:
        return component(**options)
    # A constructor raises these for a wrong value: the message is enough.
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from error
    except RlvrError:
        raise
    except USER_CODE_ERRORS as error:  # `user_traceback` leaves out the library's lines
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
