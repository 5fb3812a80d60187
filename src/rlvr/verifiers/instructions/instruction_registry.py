"""Constraints by id, and the arguments that a task gives them.

A constraint is a pure function `check(text, *, argument, ...) -> bool` of a text that is not blank. Its keyword-only
parameters are the names that IFEval's data uses under `kwargs`; their annotations say which values make sense.

Invariant of every constraint: never raises on any text, takes time linear in it, and gives the same result every time.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from rlvr.errors import nearest

Relation = Literal["less than", "at least"]
Count = Annotated[int, Field(ge=0)]
Position = Annotated[int, Field(ge=1)]
Phrase = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Phrases = Annotated[list[Phrase], Field(min_length=1)]
Letter = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1)]

F = TypeVar("F", bound=Callable[..., bool])
Problem = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Constraint:
    """One kind of constraint: its check, the types of its arguments, and what else may be wrong with them together."""

    id: str
    check: Callable[..., bool]
    arguments: Mapping[str, TypeAdapter[Any]]
    problem: Problem


CONSTRAINTS: dict[str, Constraint] = {}


def constraint(id: str, problem: Problem = lambda arguments: None) -> Callable[[F], F]:
    """Decorator: make a check known as the constraint `id`. `problem` says what is wrong with a set of arguments."""

    def keep(check: F) -> F:
        # The annotations are the schema of the data: pydantic checks a task's values by them.
        hints = typing.get_type_hints(check, include_extras=True)
        names = [p.name for p in inspect.signature(check).parameters.values() if p.kind is p.KEYWORD_ONLY]
        CONSTRAINTS[id] = Constraint(id, check, {name: TypeAdapter(hints[name]) for name in names}, problem)
        return check

    return keep


def compared(count: int, relation: Relation, threshold: int) -> bool:
    """`less than` the threshold, or `at least` as much."""
    if relation == "less than":
        return count < threshold
    return count >= threshold


@dataclass(frozen=True)
class Instruction:
    """One constraint with its arguments."""

    id: str
    follows: Callable[[str], bool]


def read_instructions(info: Mapping[str, Any]) -> list[Instruction]:
    """The instructions of a task from `instruction_id_list` and `kwargs`, as the public data writes them.

    Null arguments are as good as absent (the data set's columns are the union of all names). ValueError says what is
    wrong.
    """
    ids = info.get("instruction_id_list")
    kwargs = info.get("kwargs")
    if not _is_list(ids) or not ids:
        raise ValueError("info['instruction_id_list'] is a list of ids, and not empty")
    kwargs = [{}] * len(ids) if kwargs is None else kwargs
    if not _is_list(kwargs) or len(kwargs) != len(ids):
        raise ValueError(f"info['kwargs'] is a list with one mapping for each of the {len(ids)} instructions")
    return [_instruction(id, arguments) for id, arguments in zip(ids, kwargs, strict=True)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _instruction(id: Any, kwargs: Any) -> Instruction:
    if not isinstance(id, str) or id not in CONSTRAINTS:
        raise ValueError(f"there is no instruction {id!r}{nearest(str(id), CONSTRAINTS)}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ValueError(f"the kwargs of {id} are a mapping, not {type(kwargs).__name__}")
    kind = CONSTRAINTS[id]
    arguments = {name: value for name, value in (kwargs or {}).items() if value is not None}
    for name in arguments:
        if name not in kind.arguments:
            raise ValueError(f"{id} has no argument {name!r}{nearest(name, kind.arguments)}")
    checked: dict[str, Any] = {}
    for name, adapter in kind.arguments.items():
        if name not in arguments:
            raise ValueError(f"{id} needs the argument {name!r}")
        try:
            checked[name] = adapter.validate_python(arguments[name])
        except ValidationError as error:
            raise ValueError(f"{id}: {name}={arguments[name]!r}: {error.errors()[0]['msg']}") from None
    if (problem := kind.problem(checked)) is not None:
        raise ValueError(f"{id}: {problem}")
    return Instruction(id, functools.partial(kind.check, **checked))
