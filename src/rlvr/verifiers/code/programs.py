"""The text that is run: what a model wrote, with what the task puts before it.

Invariant: what a model wrote is never parsed here, only looked at by lines; what is parsed is the task's own.
"""

from __future__ import annotations

import ast
import re

from rlvr.verifiers.code.names import statements

# `from __future__ import annotations` at the start of a line.
_FUTURE = re.compile(r"^from __future__ import [^\n]*$", re.MULTILINE)


def assembled(program: str, prelude: str = "", stub: str = "", context: str = "", entry_point: str = "") -> str:
    """The program to run. One that does not define the function that a `stub` begins goes on with the stub; one that
    does has `context` before it."""
    # A HumanEval completion may be the body only, which goes on with the stub, or the whole function.
    if stub and not defines(program, entry_point):
        program = stub + ("" if stub.endswith("\n") or program.startswith("\n") else "\n") + program
        context = ""
    before = "\n".join(part for part in (prelude, context) if part)
    if not before:
        return program
    futures = _FUTURE.findall(program) + _FUTURE.findall(before)  # they must stand first
    # Python allows `from __future__` only before all other statements.
    if futures:
        program = _FUTURE.sub("", program)
        before = _FUTURE.sub("", before)
    return "\n".join([*dict.fromkeys(futures), before, program])


def defines(program: str, name: str) -> bool:
    """Return True if a Python program has a function or a variable of that name at its top level."""
    return (
        re.search(
            # `def f(`, `async def f(`, `f = lambda x: ...`, `f: Callable = ...` at the start of a line; not `def f2(`
            # nor `f(1)`.
            rf"^(?:(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b|{re.escape(name)}[ \t]*[=:])",
            program,
            re.MULTILINE,
        )
        is not None
    )


def has_function(program: str, name: str) -> bool:
    """Return True if a Python program has that function at its top level, or as a method of `class Solution`; `A.f` is
    one of `class A`."""
    owner, _, method = name.rpartition(".")
    if not owner and defines(program, name):
        return True
    # `class Solution:` at the top level, and `    def f(` with any indent in the text: by lines alone it is not known
    # whose method it is.
    owned = re.search(rf"^class[ \t]+{re.escape(owner or 'Solution')}\b", program, re.MULTILINE)
    return bool(owned and re.search(rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{re.escape(method)}\b", program, re.MULTILINE))


def callable_name(program: str, name: str) -> str:
    """Return the expression that calls a function of a program: `Solution.name` if only that class can have it (the
    LeetCode form)."""
    if (
        "." in name
        or "(" in name
        or defines(program, name)
        or not re.search(r"^class[ \t]+Solution\b", program, re.MULTILINE)
    ):
        return name
    return f"Solution.{name}"


def imports_of(code: str) -> str:
    """The import statements of the task's code."""
    return "\n".join(ast.unparse(node) for node in statements(code) if isinstance(node, (ast.Import, ast.ImportFrom)))


def without_function(stub: str, name: str) -> str:
    """The code of a stub less the function of that name, whose body may be missing. SyntaxError."""
    try:
        tree = ast.parse(stub)
    except SyntaxError:
        # A stub ends after its docstring or its head, where a body is missing.
        tree = ast.parse(f"{stub.rstrip()}\n    pass\n")
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == name)]
    return ast.unparse(tree)
