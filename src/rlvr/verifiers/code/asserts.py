"""Rewrites an `assert` on a program's functions, so that only their calls run in the program's process.

For `assert abs(f(2) - 1.5) < 1e-6` the program computes `f(2)`, and `abs`, the subtraction and the comparison are
computed here, on decoded values of builtin types. A test is rewritten if it consists of literals, calls of the
program's functions, the builtins of `_PLAIN` and the operators that `_expression` knows. Any other test (names of the
setup, comprehensions, `try`) runs as code in a separate process.

Invariants: the text of the test is parsed and never evaluated; each operation has Python's meaning and takes about
linear time in the size of its values (no power, product, repetition or formatting of the program's values).
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
from rlvr.verifiers.code.values import BUILTIN_METHODS, Source

CallProgram = Callable[[str, Sequence[Any], dict[str, Any]], Awaitable[Any]]
"""`await call(name, args, kwargs)`: the return value of the program's function `name`, computed in the sandbox. In
place of a name it may get an expression such as `f(3)(4)` (see `_chain`), with no arguments."""

Expression = Callable[[CallProgram], Awaitable[Any]]
"""A rewritten expression: called with a function that calls the program, it computes the expression's value."""


class NotPlainError(Exception):
    """The expression cannot be rewritten: its test must run as code."""


def rewritten(test: str | ast.stmt, functions: Collection[str]) -> Expression | None:
    """The rewritten condition of an `assert`; None if the test must run as code. `functions`: the names of the
    program's functions."""
    try:
        statement = only_statement(test) if isinstance(test, str) else test
        if isinstance(statement, ast.Assert):
            return _expression(statement.test, functions)
        return None
    except (NotPlainError, RecursionError):
        return None


def held_by(condition: Expression, call: CallProgram) -> str | None:
    """The same as `holds`, without an event loop, for a `call` that never suspends."""
    # A coroutine that never suspends runs to its end at the first `send`.
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
    """Compute the condition: None if it is true, else the reason of the failure."""
    try:
        if await condition(call):
            return None
        return "does not hold"
    # Raised by operations on values of a wrong type or size, which the program returned: the assertion fails. Any other
    # exception is a fault of this library.
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        return f"{type(error).__name__}: {short(str(error))}"


def only_statement(test: str) -> ast.stmt | None:
    """The statement of a test that has exactly one, else None. SyntaxError if the test cannot be parsed."""
    body = ast.parse(test.strip()).body
    return body[0] if len(body) == 1 else None


def _expression(node: ast.expr, functions: Collection[str]) -> Expression:
    """The rewritten form of an expression. NotPlainError if it has none."""
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
        # Only if one side is a numeric literal: `+` on two values of the program could concatenate long texts or lists.
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
    """A literal, as `ast.literal_eval` accepts it, or an infinity or NaN such as `float('inf')` or `math.nan`; None for
    any other expression."""
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
            # `float('inf')`, `float('-Infinity')`; a call with another text is not a literal.
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
    """An expression that computes `parts` in order and then applies `compute` to their values."""

    async def value(call: CallProgram) -> Any:
        return compute(*[await part(call) for part in parts])

    return value


def _program_call(name: str, node: ast.Call, functions: Collection[str]) -> Expression:
    args = _arguments(node, functions, to_program=True)
    kwargs = {keyword.arg: _program_argument(keyword.value, functions) for keyword in node.keywords if keyword.arg}
    if len(kwargs) < len(node.keywords):  # `**mapping` has no name
        raise NotPlainError

    async def value(call: CallProgram) -> Any:
        values = [await arg(call) for arg in args]
        return await call(name, values, {key: await part(call) for key, part in kwargs.items()})

    return value


def _program_argument(node: ast.expr, functions: Collection[str]) -> Expression:
    """An argument of a call of the program. A function (a lambda, a builtin or a method of a builtin type) is sent as
    its source text, if the text has the same meaning in the program."""
    match node:
        case ast.Lambda():
            parameters = {name.arg for name in ast.walk(node) if isinstance(name, ast.arg)}
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            # Any other name is one of the test or its setup, which the program does not have.
            if names <= parameters | _BUILTINS - set(functions):
                return _constant(Source(ast.unparse(node)))
        case ast.Name(id=name) if name in _BUILTINS and name not in functions:
            return _constant(Source(name))
        case ast.Attribute(value=ast.Name(id=kind), attr=name) if kind in _TYPES and hasattr(_TYPES[kind], name):
            return _constant(Source(f"{kind}.{name}"))
    return _expression(node, functions)


def _chain(node: ast.expr, functions: Collection[str]) -> Expression | None:
    """Calls and attributes of what the program returned, such as `f(3)(4)`, `f(3).area()` and `f(3).x`, computed in the
    program's process; None for any other expression.

    Attributes of builtin types are excluded: `f(3).endswith('42')` would show the expected answer to the program.
    """
    steps = 0
    inner = node
    # From the outermost step inwards: `f(3)(4).x`, `f(3)(4)`, `f(3)`.
    while not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)):
        match inner:
            case ast.Call(func=ast.Call() | ast.Attribute() as func) as outer if _takes_literals(outer):
                inner = func
            # Names with an underscore give access to the interpreter's internals (`__class__`, `__globals__`).
            case ast.Attribute(value=owner, attr=name) if name not in BUILTIN_METHODS and not name.startswith("_"):
                inner = owner
            case _:
                return None
        steps += 1
    # Without a step it is a call of the program alone, which `_program_call` handles with more kinds of arguments.
    if not steps or inner.func.id not in functions or not _takes_literals(inner):
        return None
    text = ast.unparse(node)

    async def value(call: CallProgram) -> Any:
        return await call(text, [], {})

    return value


def _takes_literals(call: ast.Call) -> bool:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(keyword.arg for keyword in call.keywords) and None not in map(_literal, arguments)


def _arguments(node: ast.Call, functions: Collection[str], to_program: bool = False) -> list[Expression]:
    if any(isinstance(arg, ast.Starred) for arg in node.args):
        raise NotPlainError
    return [(_program_argument if to_program else _expression)(arg, functions) for arg in node.args]


def _plain_call(node: ast.Call, functions: Collection[str]) -> Expression:
    """A call of `isinstance` or of a function in `_PLAIN`, computed here."""
    name = ast.unparse(node.func)
    if name == "isinstance" and len(node.args) == 2 and not node.keywords:
        kinds = _kinds(node.args[1])
        return _after([_expression(node.args[0], functions)], lambda value: isinstance(value, kinds))
    # The names of `_PLAIN` are Python's builtins only if neither the test nor its setup binds them. The caller of
    # `rewritten` checks that (`names.MEANT`).
    if name not in _PLAIN:
        raise NotPlainError
    function, keywords = _PLAIN[name]
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg not in keywords:
            raise NotPlainError
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, SyntaxError):
            raise NotPlainError from None
    return _after(_arguments(node, functions), lambda *values: function(*values, **options))


def _kinds(node: ast.expr) -> tuple[type, ...]:
    """The types that the second argument of `isinstance` names."""
    nodes = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [inner.id for inner in nodes if isinstance(inner, ast.Name) and inner.id in _TYPES]
    if len(names) < len(nodes):
        raise NotPlainError
    return tuple(_TYPES[name] for name in names)


def _comparison(node: ast.Compare, functions: Collection[str]) -> Expression:
    for op, operand in zip(node.ops, [*node.comparators], strict=True):
        identity = isinstance(op, (ast.Is, ast.IsNot))
        if identity and not (isinstance(operand, ast.Constant) and operand.value in (None, True, False)):
            raise NotPlainError  # the identity of an object is lost when its value leaves the sandbox
    parts = [_expression(part, functions) for part in (node.left, *node.comparators)]
    # As in Python, `a < b < c` computes b once and stops at the first comparison that is false.
    operators = [_COMPARE[type(op)] for op in node.ops]

    async def value(call: CallProgram) -> Any:
        left = await parts[0](call)
        result = True
        for compare, part in zip(operators, parts[1:], strict=True):
            right = await part(call)
            if not (result := compare(left, right)):
                break
            left = right
        return result

    return value


def _bool_op(node: ast.BoolOp, functions: Collection[str]) -> Expression:
    parts = [_expression(part, functions) for part in node.values]
    # As in Python, the value of `and` and `or` is that of the last operand computed.
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
    """Return True if one of the operands is a numeric literal, possibly with a sign."""
    inner = [node.operand if isinstance(node, ast.UnaryOp) else node for node in nodes]
    return any(isinstance(node, ast.Constant) and type(node.value) in (int, float) for node in inner)


def _numeric(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The operator `compute` for numbers only; TypeError for other operands."""

    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
            return compute(left, right)
        raise TypeError(f"arithmetic with {type(left).__name__} and {type(right).__name__}")

    return checked


def _set_of(kind: type) -> Callable[..., Any]:
    """`set` or `frozenset`, with a bound on the members whose hashes collide."""

    def build(items: Any = ()) -> Any:
        members: set[Any] = set()
        hashes: set[int] = set()
        for item in items:  # many members made to have the same hash would take quadratic time
            members.add(item)
            hashes.add(hash(item))
            if len(members) - len(hashes) > _MAX_COLLISIONS:
                raise ValueError("too many members of a set share their hash")
        return kind(members)

    return build


def _sum(items: Any) -> Any:
    """`sum` without its second argument, which would allow lists to be concatenated.

    The integers before the first other item are added in pairs: one after the other, a large partial sum would be
    copied for each of many small integers, in quadratic time.
    """
    items = list(items)
    count = next((at for at, item in enumerate(items) if not isinstance(item, int)), len(items))
    integers = items[:count]
    while len(integers) > 1:
        pairs = [one + other for one, other in zip(integers[::2], integers[1::2], strict=False)]
        integers = [*pairs, *integers[2 * len(pairs) :]]
    return sum(items[count:], sum(integers))


def _round(number: Any, ndigits: Any = None) -> Any:
    # `round(1, -10**9)` computes 10**(10**9).
    if isinstance(ndigits, int) and abs(ndigits) > _MAX_DIGITS:
        raise ValueError("rounding to too many digits")
    return round(number, ndigits)


_NUMBERS = (int, float, complex, Fraction, Decimal)
# The same number as in `values`, which refuses such sets from the program. Arbitrary: accidental collisions stay far
# below it.
_MAX_COLLISIONS = 64
"""Members of a set that may have the hash of another member."""
# Arbitrary, above the digits that a test rounds to.
_MAX_DIGITS = 1000

_PLAIN: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    **{function.__name__: (function, ()) for function in (abs, all, any, bool, len, list, max, min, tuple)},
    "frozenset": (_set_of(frozenset), ()),
    "isclose": (math.isclose, ("rel_tol", "abs_tol")),
    "math.isclose": (math.isclose, ("rel_tol", "abs_tol")),
    "round": (_round, ("ndigits",)),
    "set": (_set_of(set), ()),
    "sorted": (sorted, ("reverse",)),
    "sum": (_sum, ()),
}
"""Functions that are computed here -> (the function, the keyword arguments that a test may pass to it)."""

_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}

_BUILTINS = frozenset(dir(builtins))

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
