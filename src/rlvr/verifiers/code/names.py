"""The names that a task's test code binds, calls and lacks, and those of them that are the program's.

Invariant: the task's own code only; it is parsed and never run.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from rlvr.verifiers.code.preludes import meanings
from rlvr.verifiers.code.values import BUILTIN_METHODS

MEANT = frozenset({*dir(builtins), "isclose"}) - {"__name__", "__doc__", "__file__"}
"""Names whose usual meaning the rewriting of an `assert` relies on: the builtins and `isclose`. Tests of a task whose
code binds one of them are not rewritten."""

# Arbitrary: lines of code are shorter, and expected values of EvalPlus are longer.
_LONG_LINE = 4096
"""Characters of an assignment of a literal above which it is treated as data and not parsed here."""
# Matches `inputs = [[1, 'a'], (2.5, None)]` as a line of its own; not `f([1])` nor `x = [y]` (a name). Possessive
# repetitions (`++`, `*+`): without them a line that does not match after all would be tried in every way.
_DATA = re.compile(
    r"""^([ \t]*+\w++[ \t]*+=[ \t]*+)(?=[\[({])(?:
        [\[\](){},:.+\- \t]++ | \d[\w.]*+ | '(?:[^'\\\r\n]|\\.)*+' | "(?:[^"\\\r\n]|\\.)*+"
        | (?:None|True|False)\b | (?:set|float)\(
    )*+$""",
    re.MULTILINE | re.VERBOSE,
)
_IN_ITS_PLACE = "a literal that is not parsed here"


# Eight: the codes of one task are asked for several times while it is read, and a syntax tree of megabytes should not
# stay.
@functools.lru_cache(maxsize=8)
def statements(code: str) -> list[ast.stmt]:
    """The syntax tree of a task's code, which callers must not change. Each long literal that is assigned on a line of
    its own is replaced by a short text: it binds and calls nothing, and parsing the megabytes of an EvalPlus test takes
    seconds, during which no other thread runs. SyntaxError."""
    short = _DATA.sub(lambda found: f"{found[1]}{_IN_ITS_PLACE!r}" if len(found[0]) > _LONG_LINE else found[0], code)
    body = ast.parse(short).body
    inside = short != code and any(
        isinstance(node, ast.Constant) and _IN_ITS_PLACE in str(node.value) and node.value != _IN_ITS_PLACE
        for node in _nodes(body)
    )
    # The replacement is found inside of a longer text: what looked like an assignment was a line of a triple-quoted
    # string.
    return ast.parse(code).body if inside else body  # it was no assignment, but a line of a text


def bound(body: str | Sequence[ast.stmt]) -> set[str]:
    """Names that code binds, at any depth."""
    names: set[str] = set()
    for node in _nodes(body):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                # `import os.path` binds `os`.
                names.add((other or name).partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                names.add(name)
    return names


def called(body: Sequence[ast.stmt]) -> list[str]:
    """Functions that are called by name and are neither bound in `body` nor Python's own, in order."""
    own = bound(body)
    calls = [node.func.id for node in _nodes(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [name for name in dict.fromkeys(calls) if name not in own and not hasattr(builtins, name)]


def uses(body: Sequence[ast.stmt], names: Collection[str]) -> bool:
    """Return True if code mentions one of `names`."""
    return any(isinstance(node, ast.Name) and node.id in names for node in _nodes(body))


def program_names(tests: Sequence[Sequence[ast.stmt]], known: set[str], entry: str = "") -> tuple[str, frozenset[str]]:
    """The function that a task asks for, and all names of its tests that stand for the program's: what they call and
    neither they, nor their setup (`known`), nor Python's library define. A name of the library is the program's only
    where it is `entry`, or where the tests call nothing else. Empty where there is none."""
    calls = [[name for name in called(body) if name not in known] for body in tests]
    own = [name for names in calls for name in names if name not in meanings()]
    # `isclose(mean(xs), 1.5)`: where all names are the library's, the innermost call is meant.
    inner = next((names[-1] for names in calls if names), "")
    entry = entry or (own[0] if own else inner)
    return entry, frozenset({entry, *own} - known - {""})


def classes(bodies: Sequence[Sequence[ast.stmt]], names: Iterable[str]) -> set[str]:
    """The names of the program that tests use as classes, not as functions. `Stack` is one if a test uses an attribute
    of its object that no builtin value has, or calls a method for its effect (`s.append(1)`), or passes it to
    `isinstance`."""
    # By PEP 8, classes begin with a capital; a function in capitals is no class unless it is used as one.
    candidates = {name for name in names if name[:1].isupper()}
    class_names: set[str] = set()
    for body in bodies:
        made: dict[str, str] = {}
        for node in _nodes(body):
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call(func=ast.Name(id=name)))
                    | ast.withitem(context_expr=ast.Call(func=ast.Name(id=name)), optional_vars=ast.Name(id=variable))
                ) if name in candidates:
                    made[variable] = name
        for node in _nodes(body):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=attr) if attr not in BUILTIN_METHODS:
                    class_names.add(name)
                case ast.Attribute(value=ast.Name(id=name), attr=attr) if (
                    attr not in BUILTIN_METHODS or name in candidates
                ):
                    class_names.add(made.get(name, name))
                # `s.append(1)` as a statement is called for its effect on the object, which a copy sent by value would
                # not show.
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                    class_names.add(made.get(name, name))
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id=name)]):
                    class_names.add(name)
    return class_names & candidates


def exceptions(body: Sequence[ast.stmt]) -> set[str]:
    """Names that code catches: in `except`, and in calls such as `assertRaises(Own)`."""
    names: set[str] = set()
    for node in _nodes(body):
        match node:
            case ast.ExceptHandler(type=ast.expr() as caught):
                names |= {inner.id for inner in ast.walk(caught) if isinstance(inner, ast.Name)}
            case ast.Call(func=ast.Attribute(attr="assertRaises" | "raises"), args=[ast.Name(id=name), *_]):
                names.add(name)
            case ast.Call(func=ast.Name(id="suppress"), args=[ast.Name(id=name), *_]):
                names.add(name)
    return names


def missing_module(body: Sequence[ast.stmt], packages: Iterable[str]) -> str | None:
    """A module that code imports, and that neither Python's library nor `packages` have; None too for one that it tries
    to import."""
    # `try: import numpy except ImportError: ...` works without numpy.
    tried = {inner for node in _nodes(body) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    there = {*sys.stdlib_module_names, *packages}
    for node in _nodes(body):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        wanted = next((module for module in modules if module.partition(".")[0] not in there), None)
        if wanted is not None and node not in tried:
            return wanted
    return None


def captures(body: Sequence[ast.stmt]) -> str | None:
    """Return the means by which code captures what is printed, or supplies what is read, in its own process, such as
    `sys.stdout`; None if it does neither."""
    streams = ("stdin", "stdout", "stderr")
    for node in _nodes(body):
        match node:
            case ast.Name(id="redirect_stdout" | "redirect_stderr" | "capsys" | "capfd" as name):
                return name
            case ast.Attribute(value=ast.Name(id="contextlib"), attr="redirect_stdout" | "redirect_stderr" as name):
                return name
            case ast.Attribute(value=ast.Name(id="sys"), attr=name, ctx=ast.Store()) if name in streams:
                return f"sys.{name}"
            case ast.Call(
                func=ast.Name(id="patch") | ast.Attribute(attr="patch"), args=[ast.Constant(value=str(name)), *_]
            ) if name in ("builtins.input", "builtins.print", *(f"sys.{one}" for one in streams)):
                return name
    return None


def passes_objects(statement: ast.stmt, names: Iterable[str]) -> bool:
    """Return True if a call of one of the program's `names` has another such call in its arguments that may make an
    object: `f([Pair(1, 2)])`."""
    inside = [
        inner.func.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        for argument in (*node.args, *(keyword.value for keyword in node.keywords))
        for inner in ast.walk(argument)
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in names
    ]
    return any(name[:1].isupper() for name in inside)


def always_true(body: Sequence[ast.stmt]) -> str | None:
    """An assertion of a tuple, list, set, dict or function that is written out, and so holds whatever it is made of; or
    None."""
    for node in _nodes(body):
        match node:
            case ast.Assert(test=ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_]) | ast.Set() | ast.Lambda()):
                return ast.unparse(node)
            case ast.Assert(test=ast.Dict(keys=[_, *_])):
                return ast.unparse(node)
    return None


def missing(body: Sequence[ast.stmt], known: Iterable[str]) -> str | None:
    """A name that `body` uses and that nothing defines, or None; None too where it imports everything of a module."""
    return min(_lacking(body, known) - meanings().keys(), default=None)


def imports_for(body: Sequence[ast.stmt], known: Iterable[str]) -> str:
    """The imports of the library's names that `body` uses as if they were there."""
    lacking = sorted(_lacking(body, known) & meanings().keys())
    return "\n".join(meanings()[name] for name in lacking)


def _lacking(body: Sequence[ast.stmt], known: Iterable[str]) -> set[str]:
    # `from m import *` may define anything, so nothing is known to be lacking.
    if any(isinstance(node, ast.alias) and node.name == "*" for node in _nodes(body)):
        return set()
    used = {node.id for node in _nodes(body) if isinstance(node, ast.Name)}
    return used - set(known) - bound(body) - set(dir(builtins)) - {"__file__"}


def returns_value(function: ast.FunctionDef) -> bool:
    """Return True if this function returns a value other than a literal None."""
    returns = [node for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    return any(not (isinstance(node.value, ast.Constant) and node.value.value is None) for node in returns)


def yields(function: ast.FunctionDef) -> bool:
    """Return True if calling this function makes a generator."""
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
    whole = statements(body) if isinstance(body, str) else body
    return (inner for statement in whole for inner in ast.walk(statement))
