"""Checks of a component that a user wrote, when it is registered and when it is built.

Nothing reads a member whose name is a slip, so that a default would hold in silence: such names are refused. So are
values of another type than the contract's default, which would fail later with an error that does not name the
component.
"""

from __future__ import annotations

import difflib
import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

from rlvr.core.component import CONTRACTS, declared, written_name
from rlvr.core.needs import Need
from rlvr.core.validation_words import reason
from rlvr.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError

DECLARED: Any = declared
"""The class, which a type checker takes for `property`."""

BASE_CLASS_NEEDED = frozenset({"sampler", "stage"})
"""Kinds whose contract holds what a component works with, so that only its subclasses are taken."""

WITHOUT_MEMORY = frozenset({"loss", "auxiliary", "token_selector", "correction"})
"""Component kinds that do not receive the metrics of a step."""

# Chosen between the two nearest cases that were tried: a slip at 0.86, a helper at 0.83. Higher, and slips pass in
# silence; lower, and names that mean something else are refused.
SIMILAR = 0.84
"""Likeness of two names, by difflib's ratio without case and underscores, from which one is taken for a slip of the
other: `smallest_groups` is 0.96 like `smallest_group`, `ask` 0.86 like `asks`; a helper `judge` is 0.83 like
`judge_of`."""


def refuse_without_base(kind: str, name: str, component: Any) -> None:
    """ConfigError where a component of a kind that needs its base class, written as `name`, is no subclass of it."""
    if kind in BASE_CLASS_NEEDED and not (inspect.isclass(component) and issubclass(component, CONTRACTS[kind])):
        (contract,) = CONTRACTS[kind]
        raise ConfigError(f"{kind} {name!r}: make it a subclass of {contract.__module__}.{contract.__qualname__}")


def wrong_value(error: ValidationError, option: str, value: Any) -> str:
    """`option[1].key=part: what is wrong with it`, of the part of an option's value that pydantic refuses."""
    # There is an error for each member of a union. The one that lies deepest in the value is of the member that it was
    # meant for: of a list or a mapping, say, the one that it is.
    found = [(*_part_of(value, problem["loc"]), reason(problem)) for problem in error.errors()]
    _, place, part, why = max(found, key=lambda one: one[0])
    if isinstance(part, Mapping) and any(isinstance(key, bool) for key in part):
        why = "YAML reads yes, no, on and off as true and false: put them in quotes"
    # A mapping is not written out: it is long, and may hold a key of a service.
    shown = "" if isinstance(part, Mapping) else f"={part!r}"
    return f"{option}{place}{shown}: {why}"


def _part_of(value: Any, location: Iterable[str | int]) -> tuple[int, str, Any]:
    """The part of `value` that is at pydantic's `location`: its depth, its path and itself."""
    depth = 0
    path = ""
    for step in location:
        if isinstance(value, Mapping) and step in value:
            path += f".{step}"
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            path += f"[{step}]"
        else:  # the name of a union's member, or a key that is missing
            continue
        value = value[step]
        depth += 1
    return depth, path, value


def refuse_two_contracts(kind: str, component: Any) -> None:
    """ConfigError where a class has what two contracts of its kind require, so that one of them would not be called."""
    contracts = CONTRACTS.get(kind, ())
    if not inspect.isclass(component) or len(contracts) < 2:
        return
    # Members that both contracts require, such as `needs` of losses, tell nothing.
    own = set(dir(component))
    shared = frozenset.intersection(*(contract.__abstractmethods__ for contract in contracts))
    required = [contract.__abstractmethods__ - shared for contract in contracts]
    if all(names <= own for names in required):
        both = " and ".join(f"`{name}`" for names in required for name in sorted(names))
        raise ConfigError(
            f"{kind} {written_name(component)} has {both}, of which one would not be called: leave it out"
        )


def refuse_misspelt(kind: str, component: Any) -> None:
    """ConfigError where a public member of a user's class, function or instance is a slip of a member of its contract.

    It is one where its name is nearly that of a member which the component does not write, and the component does not
    read it itself: `observed` beside `observe` is a helper, and so is an option that `__call__` reads.
    """
    # Reversed, so that of two contracts the first one keeps a name that both have.
    members = {name: contract for contract in reversed(CONTRACTS.get(kind, ())) for name in dir(contract)}
    own = _own_members(component)
    if kind in WITHOUT_MEMORY and "observe" in own:
        raise ConfigError(
            f"{kind} {written_name(component)}: nothing calls its member 'observe', since a {kind} is not shown the "
            "metrics of a step: leave it out, or begin its name with an underscore"
        )
    # What the component's own code reads has a reader: it is an option or a helper, however it is spelt.
    unread = own - _read_by_itself(component) - set(members)
    for name in sorted(unread):
        if name.startswith("_"):
            near = None
        else:
            near = _nearest(name, _replaceable(members))
        if near is not None and near not in own:
            contract = members[near]
            listed = ", ".join(sorted(name for name in _replaceable(members) if name in dir(contract)))
            raise ConfigError(
                f"{kind} {written_name(component)}: nothing reads its member {name!r}; is {near!r} meant? Rename it, "
                f"or begin its name with an underscore. Members of {contract.__name__}: {listed}"
            )


def check_members(kind: str, name: str, component: Any) -> None:
    """ConfigError where a declared member of the component, written as `name`, has a value of another type than its
    default."""
    contract = next((one for one in CONTRACTS.get(kind, ()) if isinstance(component, one)), None)
    for member in () if contract is None else dir(contract):
        # Static, since `getattr` on the class would call the descriptor, which refuses it.
        static = inspect.getattr_static(contract, member)
        if isinstance(static, DECLARED) and (problem := _problem(component, member, static)) is not None:
            raise ConfigError(f"{kind} {name!r}: its member `{member}` {problem}")


def _problem(component: Any, member: str, static: Any) -> str | None:
    """Return the problem with the value of a member, in words; None where there is none."""
    try:
        value = inspect.getattr_static(component, member)
        # `def smallest_group(self): return 2` without `@property` would be compared with numbers as a method.
        if inspect.isfunction(value):
            return "is a method: make it a value, or a property"
        value = getattr(component, member)
    # A property of the user's may raise anything, and may need what only the run has.
    except Exception:  # the user's property, or a member that is required: where it is read the error says which
        return None
    if member in ("needs", "chooses_by"):
        if isinstance(value, frozenset | set):
            wrong = [one for one in value if not isinstance(one, Need)]
        else:
            wrong = [value]
        if wrong:
            return f"holds {wrong[0]!r}: write a frozenset of rlvr.core.needs.Need"
        return None
    if member == "reads" and (isinstance(value, str) or not all(isinstance(one, str) for one in value)):
        return f"is {value!r}: write a tuple of names of columns"
    try:
        default = static.function(component)
    except ConfigError:  # it is required
        return None
    # Annotations are text here: `bool | None`.
    if value is None and "None" in str(static.function.__annotations__.get("return")):
        return None
    # `type`, not `isinstance`: a bool is an int, and `smallest_group = True` is a slip. A default of None says no type.
    if isinstance(default, bool | int | str) and type(value) is not type(default):
        return f"is {value!r}, not a value of type {type(default).__name__}"
    return None


def _replaceable(members: Iterable[str]) -> list[str]:
    """The members that a component may write, of those of a contract."""
    return [name for name in members if not name.startswith("_") and name not in COMPUTED]


COMPUTED = frozenset({"asks_continuations", "has_weights", "injected", "needs_policy", "remembers"})
"""Members that the library computes."""


def _nearest(name: str, members: Iterable[str]) -> str | None:
    # `smallestGroup` is `smallest_group` in another spelling.
    plain = {_without_case(member): member for member in members}
    matches = difflib.get_close_matches(_without_case(name), plain, 1, SIMILAR)
    return plain[matches[0]] if matches else None


def _without_case(name: str) -> str:
    return name.casefold().replace("_", "")


def _own_members(component: Any) -> set[str]:
    """Names of members that a user wrote, options included."""
    if inspect.isfunction(component):
        return set(vars(component))
    names = {name for base in _written(component) for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    if not inspect.isclass(component) and names and hasattr(component, "__dict__"):
        names |= set(vars(component))
    return names


def _written(component: Any) -> list[type]:
    """The classes of a component that are neither the library's nor Python's."""
    owner = component if inspect.isclass(component) else type(component)
    # Members of the library's own base classes are right by definition.
    return [
        base for base in owner.__mro__ if base.__module__.partition(".")[0] not in ("abc", "builtins", "rlvr", "typing")
    ]


def _read_by_itself(component: Any) -> set[str]:
    """Names of attributes that the user's own code reads, of whatever."""
    if inspect.isfunction(component):
        values = [component]
    else:
        values = [v for b in _written(component) for v in vars(b).values()]
    codes = [code for value in values for code in _codes(value)]
    # LOAD_METHOD is of Python 3.11; from 3.12 on LOAD_ATTR does both.
    loads = ("LOAD_ATTR", "LOAD_METHOD")
    return {str(step.argval) for code in codes for step in dis.get_instructions(code) if step.opname in loads}


def _codes(value: Any) -> Iterator[CodeType]:
    """The code of a member, with that of functions inside it. What a dataclass generates reads every field, and is left
    out."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        yield from _codes(value.fget)
    if isinstance(value, DECLARED):
        yield from _codes(value.function)
    # A wrapped function (`functools.wraps`) reads nothing itself: the code that counts is inside.
    value = inspect.unwrap(value) if callable(value) else value
    # A dataclass compiles its `__init__`, `__eq__` and others from text, under the file name `<string>`.
    if inspect.isfunction(value) and value.__code__.co_filename != "<string>":
        yield from _with_inner(value.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
