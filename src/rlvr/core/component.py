"""Components: members with defaults, the contract of each kind, and classes without a base class made components.

A component is a subclass of a contract (rlvr.components lists them). A user may also write one without a base class, as
a function or as a plain class: the registry passes it through `adapted`, which makes it one of its contract.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, ABCMeta
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from rlvr.errors import ConfigError

# A type checker knows that `property` may be overridden by an attribute, and does not know a descriptor of ours.
if TYPE_CHECKING:
    from builtins import property as declared
else:

    class declared:  # noqa: N801 - a type checker takes it for `property`, whose name is written so
        """A member with a default: a subclass replaces it by a value, by a property or by an attribute of the instance.

        A property of Python would refuse the attribute of the instance, and a dataclass would take an inherited class
        attribute for the default of a field without one, so that the class itself does not have the member.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        # No `__set__`, so that Python looks into the instance first: `self.needs = ...` in `__init__` replaces the
        # default.
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

FILE_MODULE = "rlvr_file_"
"""Names of modules that are loaded from a file for their components begin so; the file's name and a hash follow."""

BY_SIGNATURE = frozenset({"reward"})
"""Kinds whose functions have several forms, which are told apart by their signatures where they are called."""


def adapted(kind: str, component: Any) -> Any:
    """Return a user's class, or a function with its options bound, as one of the contract of its kind.

    Classes that have the contract are returned as they are, and so is everything of a kind without one.
    """
    # A source, KL estimator, optimizer or preset has no contract: it is a function without further members.
    contracts = CONTRACTS.get(kind, ())
    if not contracts or kind == "verifier" or (inspect.isclass(component) and issubclass(component, contracts)):
        return component  # what is no Verifier is called as a function
    if inspect.isclass(component):
        # By name, before any instance is made: the class need not have a base class to be taken for one of a contract.
        own = set(dir(component))
        fitting = [contract for contract in contracts if contract.__abstractmethods__ <= own]
        if fitting:
            return _with_contract(component, fitting[0])
        required = " or ".join(f"`{name}`" for contract in contracts for name in sorted(contract.__abstractmethods__))
        raise ConfigError(f"{kind} {written_name(component)} has no {required}: write it")
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
    # An instance of a class made of both, without its `__init__`: the object was made by its own already.
    component: Any = object.__new__(_with_contract(type(function), contract))
    if hasattr(function, "__dict__"):
        # The same mapping, not a copy: what the object changes in itself, such as a counter, is seen by the component.
        component.__dict__ = vars(function)
    for base in type(function).__mro__:
        for slot in vars(base).get("__slots__", ()):
            setattr(component, slot, getattr(function, slot))
    return component


class FunctionComponent:
    """A function as a component. Attributes of the function are members of the component."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # A partial holds the function's options, and has its attributes and name only in `func`.
        functools.update_wrapper(self, function.func if isinstance(function, functools.partial) else function)
        self.__wrapped__ = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.__wrapped__(*arguments, **options)


# `isinstance` and pickling need one class, not a new one for each build.
_made: dict[tuple[type, type], type] = {}
"""(class, contract) -> the class made of both: one class gives one component class however often it is built."""


def _with_contract(component: type, contract: type) -> type:
    """A class with the members of `component`, and those of `contract` that it lacks."""
    key = (component, contract)
    if key not in _made:
        names = {name: getattr(component, name) for name in ("__module__", "__qualname__", "__doc__")}
        try:
            _made[key] = types.new_class(component.__name__, key, exec_body=lambda namespace: namespace.update(names))
        except TypeError as error:  # a metaclass of its own
            raise ConfigError(
                f"{written_name(component)} cannot be made a {contract.__name__} ({error}): make it a subclass of "
                f"{contract.__module__}.{contract.__qualname__}"
            ) from error
    return _made[key]


def written_name(component: Any) -> str:
    """The name of a user's class or function in messages: `module.Name`, or `file.py:Name` where it is from a file."""
    if isinstance(component, FunctionComponent):
        named = component.__wrapped__
    else:
        named = component
    if isinstance(named, functools.partial):
        named = named.func
    if inspect.isclass(named) or inspect.isroutine(named):
        written = named
    else:
        written = type(named)
    # None for what `exec` made in a namespace without a `__name__`.
    module = written.__module__ or "exec"
    name = written.__qualname__
    if module.startswith(FILE_MODULE):
        stem = module.removeprefix(FILE_MODULE).rpartition("_")[0]
        return f"{stem}.py:{name}"
    return f"{module}.{name}"
