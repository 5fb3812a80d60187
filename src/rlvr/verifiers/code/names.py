"""Which names a task's test code binds, calls and lacks.

Invariant: the task's own code only; it is parsed and never run.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

MEANT = frozenset({*dir(builtins), "isclose"}) - {"__name__", "__doc__", "__file__"}
"""Names that mean what they mean elsewhere, where code does not bind them itself."""


def bound(body: str | Sequence[ast.stmt]) -> set[str]:
    """Names that code gives a meaning to, at any depth."""
    found: set[str] = set()
    for node in _nodes(body):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add((other or name).partition(".")[0])
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                found.add(name)
    return found


def called(body: Sequence[ast.stmt]) -> list[str]:
    """Functions that are called by name and are neither bound in `body` nor Python's own, in order."""
    own, names = bound(body), []
    for node in _nodes(body):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name not in own and not hasattr(builtins, name):
                names.append(name)
    return list(dict.fromkeys(names))


def uses(body: Sequence[ast.stmt], names: set[str]) -> bool:
    """Whether code mentions one of `names`."""
    return any(isinstance(node, ast.Name) and node.id in names for node in _nodes(body))


def missing(body: Sequence[ast.stmt], known: set[str]) -> str | None:
    """A name that `body` uses and that nothing defines, or None; None too where it imports everything of a module."""
    if any(isinstance(node, ast.alias) and node.name == "*" for node in _nodes(body)):
        return None
    used = {node.id for node in _nodes(body) if isinstance(node, ast.Name)}
    lacking = used - known - bound(body) - set(dir(builtins)) - {"__file__"}
    return min(lacking, default=None)


def returns_value(function: ast.FunctionDef) -> bool:
    """Whether a return of this function gives a value other than a literal None."""
    returns = [node for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    return any(not (isinstance(node.value, ast.Constant) and node.value.value is None) for node in returns)


def yields(function: ast.FunctionDef) -> bool:
    """Whether calling this function makes a generator."""
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own_nodes(function))


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes within it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def _nodes(body: str | Sequence[ast.stmt]) -> Iterator[ast.AST]:
    statements = ast.parse(body).body if isinstance(body, str) else body
    return (inner for statement in statements for inner in ast.walk(statement))
