"""Components: members with defaults, the contract of each kind, and classes without a base class made components.

A component is a subclass of a contract (rlvr.components lists them). A user may also write one without a base class, as a
function or as a plain class: the registry passes it through `adapted`, which makes it one of its contract. A public member
whose name is nearly that of a member of the contract is refused by `refuse_misspelt`, since nothing would read it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from abc import ABC, ABCMeta
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rlvr.errors import ConfigError

if TYPE_CHECKING:
    from builtins import property as declared
else:

    class declared:  # noqa: N801 - a type checker takes it for `property`, whose name is written so
        """A member with a default: a subclass replaces it by a value, by a property or by an attribute of the instance.

        A property of Python would refuse the attribute of the instance, and a dataclass would take an inherited class attribute
        for the default of a field without one, so that the class itself does not have the member.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, component: Any, owner: type) -> Any:
            if component is None:
                raise AttributeError(f"{owner.__name__}.{self.name} is a member of its instances")
            return self.function(component)


class Component(ABC):  # noqa: B024 - what is required differs from kind to kind
    """A part of a run that is chosen by name in the configuration."""

    injected: ClassVar[tuple[str, ...]] = ()
    """Parameters of the constructor that the library gives; the others are options."""


CONTRACTS: dict[str, tuple[ABCMeta, ...]] = {}
"""Kind of component -> its contracts, which the modules that define them add. Of several, a class has the first whose
abstract methods it has."""

BY_SIGNATURE = frozenset({"reward"})
"""Kinds whose functions have several forms, which are told apart by their signatures where they are called."""

BASE_CLASS_NEEDED = frozenset({"sampler", "stage"})
"""Kinds whose contract holds what a component works with, so that only its subclasses are taken."""

SIMILAR = 0.88
"""Likeness of two names, by difflib's ratio, from which one is taken for a slip of the other: `smallest_groups` is 0.97
like `smallest_group`, `needed` 0.73 like `needs`."""


def adapted(kind: str, component: Any) -> Any:
    """Return a user's class, or a function with its options bound, as one of the contract of its kind.

    Classes that have the contract are returned as they are, and so is everything of a kind without one.
    """
    contracts = CONTRACTS.get(kind, ())
    if not contracts or kind == "verifier" or (inspect.isclass(component) and issubclass(component, contracts)):
        return component  # what is no Verifier is called as a function
    if inspect.isclass(component):
        own = set(dir(component))
        for contract in contracts:
            if contract.__abstractmethods__ <= own:
                return _with_contract(component, contract)
        required = " or ".join(f"`{name}`" for contract in contracts for name in sorted(contract.__abstractmethods__))
        raise ConfigError(f"{kind} {component.__module__}.{component.__qualname__} has no {required}: write it")
    if isinstance(component, contracts) or kind in BY_SIGNATURE:
        return component
    return called_as(next(one for one in contracts if one.__abstractmethods__ == {"__call__"}), component)


def called_as(contract: type, function: Callable[..., Any]) -> Any:
    """Return a component of the contract that calls `function`: a function, or an object that is called like one.

    Of an object the members remain, and its attributes are shared with the component.
    """
    if isinstance(function, contract):
        return function
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return _with_contract(FunctionComponent, contract)(function)
    made = _with_contract(type(function), contract)
    component: Any = object.__new__(made)
    component.__dict__ = vars(function)
    return component


class FunctionComponent:
    """A function as a component. Attributes of the function are members of the component."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # A partial holds the function's options, and has its attributes and name only in `func`.
        written = function.func if isinstance(function, functools.partial) else function
        functools.update_wrapper(self, written)
        self.__wrapped__ = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)


_made: dict[tuple[type, type], type] = {}
"""(class, contract) -> the class made of both: one class gives one component class however often it is built."""


def _with_contract(component: type, contract: type) -> type:
    """A class with the members of `component`, and those of `contract` that it lacks."""
    key = (component, contract)
    if key not in _made:
        names = {name: getattr(component, name) for name in ("__module__", "__qualname__", "__doc__")}
        _made[key] = types.new_class(component.__name__, key, exec_body=lambda namespace: namespace.update(names))
    return _made[key]


def refuse_without_base(kind: str, name: str, component: Any) -> None:
    """ConfigError where a component of a kind that needs its base class, written as `name`, is no subclass of it."""
    if kind in BASE_CLASS_NEEDED and not (inspect.isclass(component) and issubclass(component, CONTRACTS[kind])):
        (contract,) = CONTRACTS[kind]
        raise ConfigError(f"{kind} {name!r}: make it a subclass of {contract.__module__}.{contract.__qualname__}")


def refuse_misspelt(kind: str, component: Any) -> None:
    """ConfigError where a public member of a user's class, function or instance is nearly called like one of its contract.

    A name is no slip where the component has the member that it is like: `observed` beside `observe`.
    """
    contracts = CONTRACTS.get(kind, ())
    known = {name for contract in contracts for name in dir(contract) if not name.startswith("_")}
    own = _own_members(component)
    for name in sorted(own - known):
        near = difflib.get_close_matches(name, known, 1, SIMILAR)
        if near and near[0] not in own and not name.startswith("_"):
            written = component if inspect.isclass(component) or inspect.isfunction(component) else type(component)
            raise ConfigError(
                f"{kind} {written.__module__}.{written.__qualname__}: nothing reads its member {name!r}; is {near[0]!r} meant? "
                f"Rename it, or begin its name with an underscore. Members of {contracts[0].__name__}: {', '.join(sorted(known))}"
            )


def _own_members(component: Any) -> set[str]:
    """Names of members that a user wrote, without the options of a class."""
    if inspect.isfunction(component):
        return set(vars(component))
    owner = component if inspect.isclass(component) else type(component)
    written = [base for base in owner.__mro__ if base is not object and not base.__module__.startswith("rlvr.")]
    names = {name for base in written for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    if owner is not component and written:
        names |= set(vars(component))
    return names - set(inspect.signature(owner).parameters) if names else names
