"""An assertion on a program's functions, rewritten into calls of them and a comparison outside of the sandbox.

`assert abs(f(2) - 1.5) < 1e-6` becomes: let the program compute `f(2)`, then compare here. What is rewritten: literals,
calls of the program's functions, and the few operations of `_PLAIN` and below, on exact builtin values. The rest (names
of the setup, comprehensions, `try`) is not, and runs as a test in a process of its own.

Invariants: the test's text is parsed, never evaluated; an operation here costs time linear in its values (no power, no
product, no repetition, no formatting of what the program gave), and means what Python means by it.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Awaitable, Callable, Collection, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rlvr.verifiers.code.compare import short
from rlvr.verifiers.code.values import Source

CallProgram = Callable[[str, Sequence[Any], dict[str, Any]], Awaitable[Any]]
"""`await call(name, args, kwargs)`: what the program's function returns, computed in the sandbox. In place of a name,
with no arguments, it may be an expression that begins with one: `f(3)(4)`."""

Expression = Callable[[CallProgram], Awaitable[Any]]
"""An assertion's value, given how to call the program."""


class NotPlainError(Exception):
    """An expression that is not computed here."""


def rewritten(test: str | ast.stmt, functions: Collection[str]) -> Expression | None:
    """The condition of an `assert`, or None where the test has to run as it is. `functions`: what the program
    defines."""
    try:
        statement = only_statement(test) if isinstance(test, str) else test
        if isinstance(statement, ast.Assert):
            return _expression(statement.test, functions)
        return None
    except (NotPlainError, RecursionError):
        return None


def held_by(condition: Expression, call: CallProgram) -> str | None:
    """None where the condition holds, else what is wrong, for a `call` that never waits for anything."""
    # A coroutine whose calls never wait runs to its end at the first `send`: no event loop is needed in a judge.
    running = holds(condition, call)
    try:
        running.send(None)
    except StopIteration as end:
        problem: str | None = end.value
        return problem
    finally:
        running.close()
    raise RuntimeError("the call waits")


async def holds(condition: Expression, call: CallProgram) -> str | None:
    """None where the condition holds, else what is wrong."""
    try:
        if await condition(call):
            return None
        return "does not hold"
    # What comparing and computing raise on wrong types or values: the program's fault. Anything else is ours, and is
    # raised.
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        return f"{type(error).__name__}: {short(str(error))}"


def only_statement(test: str) -> ast.stmt | None:
    """The statement of a test that consists of one, else None. SyntaxError where it cannot be parsed."""
    body = ast.parse(test.strip()).body
    return body[0] if len(body) == 1 else None


def _expression(node: ast.expr, functions: Collection[str]) -> Expression:
    if (constant := _literal(node)) is not None:
        return constant
    if (chain := _chain(node, functions)) is not None:
        return chain
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            return _program_call(name, node, functions)
        case ast.Call():
            return _plain_call(node, functions)
        case ast.Compare():
            return _comparison(node, functions)
        case ast.BoolOp():
            return _bool_op(node, functions)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _expression(operand, functions)
            return _after([inner], operator.not_)
        # Only with a number on one side: `+` of two answers could concatenate texts or lists, and repeat that at will.
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Div() as op, right=right) if _number_in(left, right):
            parts = [_expression(left, functions), _expression(right, functions)]
            return _after(
                parts, _numeric({ast.Add: operator.add, ast.Sub: operator.sub}.get(type(op), operator.truediv))
            )
        case ast.List(elts=items) | ast.Tuple(elts=items):
            kind = list if isinstance(node, ast.List) else tuple
            return _after([_expression(item, functions) for item in items], lambda *values: kind(values))
        case ast.Subscript(value=value, slice=index):
            return _after([_expression(value, functions), _expression(index, functions)], operator.getitem)
    raise NotPlainError


def _literal(node: ast.expr) -> Expression | None:
    """A constant: what ast.literal_eval takes, and infinities and NaN as they are written."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=inner) if (value := _special_float(inner)) is not None:
            return _constant(-value)
        case ast.Call() if (value := _special_float(node)) is not None:
            return _constant(value)
    try:
        return _constant(ast.literal_eval(node))
    except (ValueError, TypeError, MemoryError, SyntaxError):
        return None


def _special_float(node: ast.expr) -> float | None:
    match node:
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))], keywords=[]):
            # `float('inf')`, `float('-Infinity')`; other texts are left to the test as it is.
            if text.strip().casefold().lstrip("+-") in ("inf", "infinity", "nan"):
                return float(text)
            return None
        case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan" as name):
            return float(name)
    return None


def _constant(value: Any) -> Expression:
    async def constant(call: CallProgram) -> Any:
        return value

    return constant


def _after(parts: Sequence[Expression], compute: Callable[..., Any]) -> Expression:
    """`compute` of the values of `parts`, which are computed in order."""

    async def value(call: CallProgram) -> Any:
        return compute(*[await part(call) for part in parts])

    return value


def _program_call(name: str, node: ast.Call, functions: Collection[str]) -> Expression:
    args = _arguments(node, functions, given=True)
    kwargs = {keyword.arg: _given(keyword.value, functions) for keyword in node.keywords if keyword.arg}
    if len(kwargs) < len(node.keywords):
        raise NotPlainError

    async def value(call: CallProgram) -> Any:
        values = [await arg(call) for arg in args]
        return await call(name, values, {key: await part(call) for key, part in kwargs.items()})

    return value


def _given(node: ast.expr, functions: Collection[str]) -> Expression:
    """An argument of a call of the program, which may be a function: as its text, where that means the same in the
    program."""
    match node:
        case ast.Lambda():
            own = {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            # A lambda that uses a name of the test or of its setup would mean something else in the program.
            if names <= own | _BUILTINS - set(functions):
                return _constant(Source(ast.unparse(node)))
        case ast.Name(id=name) if name in _BUILTINS and name not in functions:
            return _constant(Source(name))
        case ast.Attribute(value=ast.Name(id=kind), attr=name) if kind in _TYPES and hasattr(_TYPES[kind], name):
            return _constant(Source(f"{kind}.{name}"))
    return _expression(node, functions)


def _chain(node: ast.expr, functions: Collection[str]) -> Expression | None:
    """`f(3)(4)`, `f(3).area()`, `f(3).x`: what is done with a function or an object that the program made, computed in
    the program's process; None for any other expression. Methods of builtin types are not: `f(3).endswith('42')` would
    tell the answer."""
    steps = 0
    inner = node
    # From the outside in: `f(3)(4).x` is an attribute of a call of a call of `f`.
    while not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)):
        match inner:
            case ast.Call(func=ast.Call() | ast.Attribute() as func):
                arguments = [*inner.args, *(keyword.value for keyword in inner.keywords)]
                if not all(keyword.arg for keyword in inner.keywords) or None in map(_literal, arguments):
                    return None
                inner = func
            # Names with an underscore reach into the interpreter (`__class__`, `__globals__`).
            case ast.Attribute(value=owner, attr=name) if name not in _METHODS and not name.startswith("_"):
                inner = owner
            case _:
                return None
        steps += 1
    arguments = [*inner.args, *(keyword.value for keyword in inner.keywords)]
    plain = all(keyword.arg for keyword in inner.keywords) and None not in map(_literal, arguments)
    # Without a step it is an ordinary call of the program, whose arguments need not be literals.
    if not steps or inner.func.id not in functions or not plain:
        return None
    text = ast.unparse(node)

    async def value(call: CallProgram) -> Any:
        return await call(text, [], {})

    return value


def _arguments(node: ast.Call, functions: Collection[str], given: bool = False) -> list[Expression]:
    if any(isinstance(arg, ast.Starred) for arg in node.args):
        raise NotPlainError
    return [(_given if given else _expression)(arg, functions) for arg in node.args]


def _plain_call(node: ast.Call, functions: Collection[str]) -> Expression:
    name = ast.unparse(node.func)
    if name == "isinstance" and len(node.args) == 2 and not node.keywords:
        kinds = _kinds(node.args[1])
        return _after([_expression(node.args[0], functions)], lambda value: isinstance(value, kinds))
    # `_PLAIN` holds what the test means by a name only where the test does not bind it; the caller has seen to that
    # (`MEANT`).
    if name not in _PLAIN:
        raise NotPlainError
    function, keywords = _PLAIN[name]
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg not in keywords:
            raise NotPlainError
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise NotPlainError from None
    return _after(_arguments(node, functions), lambda *values: function(*values, **options))


def _kinds(node: ast.expr) -> tuple[type, ...]:
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [inner.id for inner in nodes if isinstance(inner, ast.Name) and inner.id in _TYPES]
    if len(names) < len(nodes):
        raise NotPlainError
    return tuple(_TYPES[name] for name in names)


def _comparison(node: ast.Compare, functions: Collection[str]) -> Expression:
    for op, operand in zip(node.ops, [*node.comparators], strict=True):
        identity = isinstance(op, (ast.Is, ast.IsNot))
        if identity and not (isinstance(operand, ast.Constant) and operand.value in (None, True, False)):
            raise NotPlainError  # what is the same object is lost on the way out of the sandbox
    parts = [_expression(part, functions) for part in (node.left, *node.comparators)]
    # Python's chains: `a < b < c` computes b once and stops at the first comparison that does not hold.
    operators = [_COMPARE[type(op)] for op in node.ops]

    async def value(call: CallProgram) -> Any:
        left = await parts[0](call)
        holds = True
        for compare, part in zip(operators, parts[1:], strict=True):
            right = await part(call)
            if not (holds := compare(left, right)):
                break
            left = right
        return holds

    return value


def _bool_op(node: ast.BoolOp, functions: Collection[str]) -> Expression:
    parts = [_expression(part, functions) for part in node.values]
    # As Python's `and` and `or`: the value is the last one computed, not a bool.
    stops_at = isinstance(node.op, ast.Or)

    async def value(call: CallProgram) -> Any:
        result: Any = not stops_at
        for part in parts:
            result = await part(call)
            if bool(result) is stops_at:
                break
        return result

    return value


def _number_in(*nodes: ast.expr) -> bool:
    """Return whether one of the sides is a number, so that the operation is arithmetic."""
    inner = [node.operand if isinstance(node, ast.UnaryOp) else node for node in nodes]
    return any(isinstance(node, ast.Constant) and type(node.value) in (int, float) for node in inner)


def _numeric(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
            return compute(left, right)
        raise TypeError(f"arithmetic with {type(left).__name__} and {type(right).__name__}")

    return checked


def _set_of(kind: type) -> Callable[..., Any]:
    def build(items: Any = ()) -> Any:
        members: set[Any] = set()
        hashes: set[int] = set()
        for item in items:  # members with the same hash by design would make the building quadratic
            members.add(item)
            hashes.add(hash(item))
            if len(members) - len(hashes) > _ALIKE:
                raise ValueError("too many members of a set share their hash")
        return kind(members)

    return build


def _sum(items: Any) -> Any:
    """The sum, without a start, so that no lists are concatenated. Integers are added in pairs: one after the other, a
    large one is copied for each of many small ones, which is quadratic. Past the first float every addition is
    short."""
    items = list(items)
    count = next((at for at, item in enumerate(items) if not isinstance(item, int)), len(items))
    integers = items[:count]
    while len(integers) > 1:
        pairs = [one + other for one, other in zip(integers[::2], integers[1::2], strict=False)]
        integers = [*pairs, *integers[2 * len(pairs) :]]
    return sum(items[count:], sum(integers))


def _round(number: Any, ndigits: Any = None) -> Any:
    # `round(1, -10**9)` computes 10**(10**9).
    if isinstance(ndigits, int) and abs(ndigits) > _DIGITS:
        raise ValueError("rounding to too many digits")
    return round(number, ndigits)


_NUMBERS = (int, float, complex, Fraction, Decimal)
# As in `values`, which refuses such sets from the program. Arbitrary: collisions of honest hashes stay far below it.
_ALIKE = 64
# As in `values`. Arbitrary, beyond what any test rounds to.
_DIGITS = 1000

_PLAIN: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "abs": (abs, ()),
    "all": (all, ()),
    "any": (any, ()),
    "bool": (bool, ()),
    "frozenset": (_set_of(frozenset), ()),
    "isclose": (math.isclose, ("rel_tol", "abs_tol")),
    "len": (len, ()),
    "list": (list, ()),
    "math.isclose": (math.isclose, ("rel_tol", "abs_tol")),
    "max": (max, ()),
    "min": (min, ()),
    "round": (_round, ("ndigits",)),
    "set": (_set_of(set), ()),
    "sorted": (sorted, ("reverse",)),
    "sum": (_sum, ()),
    "tuple": (tuple, ()),
}
"""Builtins that may stand round a call of the program, with the keywords that they may have."""

_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}

_BUILTINS = frozenset(dir(builtins))
_METHODS = frozenset(name for kind in (*_TYPES.values(), bytearray, range, object) for name in dir(kind))
"""Attributes of builtin values, which are looked at where the test runs."""

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
