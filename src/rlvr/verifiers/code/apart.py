"""The text of a test that runs as code, apart from the program: its names of the program, and which of its calls give
changes back.

A call that goes to the program's process changes copies of its arguments. Where it is marked here, the test's own
objects are changed in the same way. A program could otherwise change what the right answer is computed from: emptied by
`f`, `xs` makes `f(xs) == sorted(xs)` true for `[]`. So a call is marked only where its value is thrown away or compared
with nothing but literals.

Invariant: the task's own code only; it is parsed and never run.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rlvr.verifiers.code.names import statements

IN_PLACE = "__in_place__"
"""The function in a test's process that takes a stand-in for the program's function and returns one whose calls also
change the test's own arguments."""
OF_PROGRAM = "__of_program__"
"""The function in a test's process that returns the stand-in for a name of the program, by its kind: `function`,
`class` or `exception`."""
# Lines as the parser counts them: "a\r\nb" is two, and a form feed, at which `str.splitlines` cuts, ends none.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")
_KEEPS = ("len", "list", "set", "sorted", "tuple")
"""Builtins whose result is made of nothing but what the program returned."""


def naming(kinds: Mapping[str, str]) -> str:
    """The lines that give a test its names of the program."""
    return "\n".join(f"{name} = {OF_PROGRAM}({name!r}, {kind!r})" for name, kind in sorted(kinds.items()))


def with_changes(source: str) -> str:
    """The test's source with its calls marked, line for line."""
    inserted: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for call in _harmless(statements(source)):
        func = call.func
        inserted[func.lineno].append((func.col_offset, f"{IN_PLACE}(".encode()))
        inserted[func.end_lineno or func.lineno].append((func.end_col_offset or 0, b")"))
    lines = _LINE.findall(source)
    for number, marks in inserted.items():
        line = lines[number - 1].encode()  # columns are counted in bytes of UTF-8
        # From the right, so that earlier columns stay as they were counted.
        for at, text in sorted(marks, reverse=True):
            line = line[:at] + text + line[at:]
        lines[number - 1] = line.decode()
    return "".join(lines)


def _harmless(body: Sequence[ast.stmt]) -> Iterator[ast.Call]:
    """The calls of functions by name whose value decides nothing but a comparison with literals."""
    parents: dict[ast.AST, ast.AST] = {}
    reads: dict[str, list[ast.Name]] = defaultdict(list)
    for statement in body:
        for node in ast.walk(statement):
            for child in ast.iter_child_nodes(node):
                parents[child] = node
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                reads[node.id].append(node)
    followed: set[str] = set()

    def harmless(node: ast.AST) -> bool:
        match parents[node]:
            # A statement of its own: its value is thrown away.
            case ast.Expr():
                return True
            # `y = f(xs)`: harmless if every use of `y` is. A name that is followed already is not followed again, or `y
            # = g(y)` would never end.
            case ast.Assign(targets=[ast.Name(id=name)]):
                if name in followed:
                    return True
                followed.add(name)
                return all(map(harmless, reads[name]))
            case (ast.Subscript() | ast.Slice()) as part:
                return harmless(part)
            # `sorted(f(xs)) == [1, 2]`.
            case ast.Call(func=ast.Name(id=name), args=[only]) as call if name in _KEEPS and only is node:
                return harmless(call)
            # `f(xs) == [1, 2]` is; `f(xs) == sorted(xs)` is not, since `f` may have changed `xs`.
            case ast.Compare(left=left, comparators=others):
                return all(side is node or _is_literal(side) for side in (left, *others))
        return False

    for call in parents:
        if isinstance(call, ast.Call) and isinstance(call.func, (ast.Name, ast.Attribute)):
            followed.clear()
            if harmless(call):
                yield call


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
