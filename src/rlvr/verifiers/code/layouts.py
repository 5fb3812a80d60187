"""The layout of a task's `info` for programs: read, checked, and turned into cases.

    {"kind": "stdio", "cases": [{"input": "...", "output": "..."}]}
    {"kind": "function", "name": "f", "cases": [{"args": [...], "kwargs": {}, "expected": ...}], "result_argument": 0}
    {"kind": "asserts", "entry_point": "f", "tests": ["assert f(1) == 2", ...], "setup": "..."}
    {"kind": "humaneval", "prompt": "def f(x): ...", "entry_point": "f", "test": "def check(candidate): ..."}
    {"kind": "checker", "checker": "def check(input, output): ...", "cases": [{"input": "..."}]}
    {"kind": "property", "entry_point": "f", "property": "def holds(f, random): ...", "trials": 20}

All may have `language`, `time_limit` (seconds of a case), `memory_mb`, `packages` ([numpy]), `comparison`, `prelude`
(code in front of the program), `solution`; a case may have a `weight`, and `weights` are those of `tests`.
`harness: livecodebench` gives a `stdio` program the names that this harness does (`preludes.py`); a `function` always
has them. The first three lines of defence: what is expected stays in the cases here; `setup` is the tests' own, of
which a program gets the imports only; a test that cannot be rewritten is run apart from the program.

Invariant: the only error is LayoutError, which names the place and says how to correct it.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.errors import nearest
from rlvr.verifiers.code.apart import naming, with_changes
from rlvr.verifiers.code.asserts import rewritten
from rlvr.verifiers.code.cases import AssertCase, CallCase, Case, CheckerCase, PropertyCase, ProxiedCase, StdioCase
from rlvr.verifiers.code.compare import Comparison, short
from rlvr.verifiers.code.extraction import ALIASES, language_of
from rlvr.verifiers.code.layout_fields import (
    LayoutError,
    canonical,
    read_name,
    read_number,
    read_string,
    read_text,
    read_weight,
    read_weights,
)
from rlvr.verifiers.code.names import (
    MEANT,
    always_true,
    bound,
    captures,
    classes,
    exceptions,
    imports_for,
    missing,
    missing_module,
    passes_objects,
    program_names,
    returns_value,
    statements,
    uses,
    yields,
)
from rlvr.verifiers.code.packages import PACKAGES
from rlvr.verifiers.code.preludes import HARNESSES, IMPORTS, NODES
from rlvr.verifiers.code.programs import assembled, imports_of, without_function
from rlvr.verifiers.code.runner import Call
from rlvr.verifiers.code.values import encode

# Ten minutes for one case: more is surely milliseconds taken for seconds.
MAX_SECONDS = 600.0
# Arbitrary: a property that fails on one input in ten is missed by 20 inputs in 12 % of cases (0.9**20).
TRIALS = 20


@dataclass(frozen=True)
class Layout:
    """A task that has been read and checked, ready to run programs on."""

    kind: str
    language: str
    cases: tuple[Case, ...]
    prelude: str = ""
    """Code that is put before a program."""
    stub: str = ""
    """The beginning of the function of a HumanEval task, which a program may continue."""
    context: str = ""
    """The code around that function, for a program that writes the whole function itself."""
    entry_point: str = ""
    time_limit: float | None = None
    memory_mb: int | None = None
    packages: tuple[str, ...] = ()
    solution: str | None = None
    lacks: str = ""
    """The import of its code that no sandbox here can provide, in words; empty if there is none."""
    digest: str = ""
    """Digest of everything that decides a verdict."""


def read_layout(info: Mapping[str, Any], language: str, comparison: Comparison, prompt: Any = None) -> Layout:
    """The layout that `info` describes; `language` and `comparison` hold where it says nothing, `prompt` is the
    task's."""
    # Rows of one table have the union of all columns, with null where a task has none.
    info = {name: value for name, value in info.items() if value is not None}
    kind = info.get("kind")
    if kind not in _READERS:
        kinds = ", ".join(_READERS)
        if kind is None:
            problem = "there is no info['kind']"
        else:
            problem = f"info['kind'] is {kind!r}{nearest(str(kind), _READERS)}"
        raise LayoutError(f"{problem}; it is one of {kinds}")
    language = _language(info, language)
    if kind in _PYTHON_ONLY and language != "python":
        raise LayoutError(f"kind {kind!r} is for Python; for language {language!r} use kind 'stdio' or 'checker'")
    # HumanEval's `prompt` is the stub of the function, which is often the task's prompt itself.
    if kind == "humaneval" and "prompt" not in info and isinstance(prompt, str):
        info["prompt"] = prompt
    try:
        how = Comparison.read(info.get("comparison"), comparison)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    cases, more = _READERS[kind](info, how)
    if not cases:
        raise LayoutError("no test calls the program: every program would pass")
    # The score divides by the sum of the weights.
    if not any(case.weight > 0 for case in cases):
        raise LayoutError("the weights of all cases are 0")
    if language == "python":
        prelude = _parsed(info, "prelude", "")
    else:
        prelude = read_text(info, "prelude", "")
    prelude = "\n".join(part for part in (more.pop("prelude", ""), prelude) if part)
    packages = _packages(info, language)
    return Layout(
        kind=kind,
        language=language,
        cases=tuple(cases),
        prelude=prelude,
        time_limit=read_number(info, "time_limit", MAX_SECONDS),
        memory_mb=None if (memory := read_number(info, "memory_mb", 1 << 20)) is None else max(1, int(memory)),
        packages=packages,
        lacks=_lacks(info, language, packages),
        solution=read_text(info, "solution", "") or None,
        # A key for remembered verdicts and validated solutions: two tasks with the same digest are judged the same.
        digest=hashlib.sha256("".join(canonical([info, language, dataclasses.astuple(how)])).encode()).hexdigest(),
        **more,
    )


_Read = tuple[list[Case], dict[str, Any]]


def _stdio(info: Mapping[str, Any], how: Comparison) -> _Read:
    def case(row: Mapping[str, Any], place: str, weight: float) -> Case:
        return StdioCase(place, weight, read_string(row, "input", place, ""), read_string(row, "output", place), how)

    return _cases(info, case), {"prelude": _harness(info)}


def _function(info: Mapping[str, Any], how: Comparison) -> _Read:
    name = read_name(info, "name")
    argument = info.get("result_argument")
    if argument is not None and (not isinstance(argument, int) or isinstance(argument, bool) or argument < 0):
        raise LayoutError(f"info['result_argument'] is the number of an argument, from 0 on, not {argument!r}")

    def case(row: Mapping[str, Any], place: str, weight: float) -> Case:
        args = row.get("args", [])
        kwargs = row.get("kwargs") or {}
        # A mapping here would be `kwargs`; a text would be taken letter by letter.
        if not isinstance(args, (list, tuple)):
            raise LayoutError(f"{place}: 'args' is the list of the call's arguments, not {type(args).__name__}")
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise LayoutError(f"{place}: 'kwargs' is a mapping from names to arguments, not {type(kwargs).__name__}")
        if "expected" not in row:
            raise LayoutError(
                f"{place}: there is no 'expected' (it has {', '.join(row) or 'nothing'}); null is a value"
            )
        if argument is not None and argument >= len(args):
            raise LayoutError(f"{place}: there is no argument {argument} (result_argument); 'args' has {len(args)}")
        try:
            call = Call(name, argument=argument, encoded=encode([list(args), dict(kwargs)]))
            expected = encode(row["expected"])
        except ValueError as error:
            raise LayoutError(f"{place}: {error}") from None
        return CallCase(place, weight, call, row["expected"], expected, how)

    return _cases(info, case, keep_null=True), {"prelude": IMPORTS + NODES, "entry_point": name}


def _harness(info: Mapping[str, Any]) -> str:
    """Return the code that the harness named by a task puts before a program; empty for a language other than
    Python."""
    name = info.get("harness")
    if name is None or _language(info, "python") != "python":
        return ""
    if name not in HARNESSES:
        raise LayoutError(f"'harness' is {name!r}{nearest(str(name), HARNESSES)}; it is one of {', '.join(HARNESSES)}")
    return HARNESSES[name]


def _asserts(info: Mapping[str, Any], how: Comparison) -> _Read:
    setup = _parsed(info, "setup", "")
    tests = info.get("tests")
    if not isinstance(tests, (list, tuple)) or not tests or not all(isinstance(test, str) for test in tests):
        raise LayoutError("'tests' is a list of Python tests, such as [\"assert f(1) == 2\"]; it needs one at least")
    parsed = [_statements(test, f"tests[{number}]") for number, test in enumerate(tests)]
    # What the setup defines is the tests' own and not the program's.
    setup_names = bound(setup)
    if "entry_point" in info:
        named_entry = read_name(info, "entry_point")
    else:
        named_entry = ""
    bodies = [*parsed, statements(setup)]
    entry, functions = program_names(bodies, setup_names, named_entry)
    if not entry:
        raise LayoutError("no test calls a function of the program; name it: entry_point")
    kinds = dict.fromkeys(functions, "function") | dict.fromkeys(classes(bodies, functions), "class")
    cases: list[Case] = []
    for number, (test, body, weight) in enumerate(zip(tests, parsed, read_weights(info, len(tests)), strict=True)):
        place = f"tests[{number}]"
        if not uses(body, functions):
            continue  # `assert True` would pay any program
        # A rewritten test means Python's builtins by their names; where the setup binds `len` or `sorted` itself, the
        # test runs as code.
        plain = len(body) == 1 and not setup_names & MEANT and not passes_objects(body[0], functions)
        condition = rewritten(body[0], functions) if plain else None
        if condition is not None:
            cases.append(AssertCase(place, weight, condition, ast.unparse(body[0]), functions))
            continue
        cases.append(ProxiedCase(place, weight, _apart(f"{setup}\n{test.strip()}\n", entry, place, kinds), entry))
    return cases, {"prelude": imports_of(setup), "entry_point": entry}


def _humaneval(info: Mapping[str, Any], how: Comparison) -> _Read:
    entry = read_name(info, "entry_point")
    stub = read_text(info, "prompt")
    test = _parsed(info, "test")
    try:
        context = without_function(stub, entry)
    except SyntaxError as error:
        raise LayoutError(f"the prompt is no Python up to the body of {entry!r}: {error}") from None
    # HumanEval's harness calls `check(candidate)` (human_eval/execution.py).
    checks = [node for node in statements(test) if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise LayoutError("'test' defines one function check(candidate)")
    check = checks[0]
    names = {entry, check.args.args[0].arg}
    body = [node for node in check.body if not isinstance(node, ast.Pass) and not _is_text(node)]
    body = [node for node in body if not isinstance(node, ast.Assert) or uses([node], names)]  # `assert True`
    bound_names = (bound(test) | bound(context)) - {"check"}
    conditions = [rewritten(node, names) for node in body]
    more = {"stub": stub, "context": context, "entry_point": entry}
    # All or nothing: assertions may depend on each other's statements.
    if body and all(conditions) and not bound_names & MEANT and not _strays(test):
        weights = read_weights(info, len(body))
        pairs = enumerate(zip(conditions, body, weights, strict=True))
        texts = [(number, condition, ast.unparse(node), weight) for number, (condition, node, weight) in pairs]
        cases: list[Case] = [
            AssertCase(f"assert {number + 1} of check", weight, condition, text, frozenset(names), entry)
            for number, condition, text, weight in texts
            if condition is not None
        ]
        return cases, more
    whole = f"{context}\n{test}\ncheck({entry})\n"
    return [ProxiedCase("check", 1.0, _apart(whole, entry, "test"), entry)], more


def _checker(info: Mapping[str, Any], how: Comparison) -> _Read:
    checker = _parsed(info, "checker")
    checks = [node for node in statements(checker) if isinstance(node, ast.FunctionDef) and node.name == "check"]
    parameters = _given_to_checker(checks[0].args) if checks else 0

    def case(row: Mapping[str, Any], place: str, weight: float) -> Case:
        expected = read_string(row, "output", place, "")
        return CheckerCase(place, weight, checker, parameters, read_string(row, "input", place, ""), expected)

    return _cases(info, case), {}


def _given_to_checker(arguments: ast.arguments) -> int:
    """Number of values that a checker's function is given: 2, or 3 where it takes what is expected. LayoutError for
    another function."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = len(names) - len(arguments.defaults)
    if len(names) < 2 or needed > 3 or None in arguments.kw_defaults:
        raise LayoutError(
            "the checker's function is check(input, output) or check(input, output, expected); other parameters need "
            "a default"
        )
    # A third one with a default may be the checker's own, such as a tolerance.
    if needed == 3 or names[2:3] == ["expected"]:
        return 3
    return 2


def _property(info: Mapping[str, Any], how: Comparison) -> _Read:
    entry = read_name(info, "entry_point")
    text = _parsed(info, "property")
    checks = [node for node in statements(text) if isinstance(node, ast.FunctionDef) and node.name == "holds"]
    if len(checks) != 1 or len(checks[0].args.args) != 2:
        raise LayoutError(
            "'property' defines holds(f, random), which tries the function f on one input made with random, and raises "
            "or returns a false value where the property does not hold"
        )
    text = _apart(text, entry, "property", changes=False)
    # A generator object is true, so that `assert holds(...)` would hold for any program.
    if yields(checks[0]):
        raise LayoutError("'property': holds(f, random) is a generator, which is always true; return a bool")
    trials = info.get("trials", TRIALS)
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise LayoutError(f"'trials' is a whole number of 1 or more, not {trials!r}")
    valued = returns_value(checks[0])
    cases: list[Case] = [PropertyCase(f"trial {at + 1}", 1.0, text, entry, at, valued) for at in range(trials)]
    return cases, {"entry_point": entry}


_READERS: dict[str, Callable[[Mapping[str, Any], Comparison], _Read]] = {
    "stdio": _stdio,
    "function": _function,
    "asserts": _asserts,
    "humaneval": _humaneval,
    "checker": _checker,
    "property": _property,
}
_PYTHON_ONLY = ("function", "asserts", "humaneval", "property")


def _language(info: Mapping[str, Any], default: str) -> str:
    written = info.get("language", default)
    language = language_of(str(written))
    if language is None:
        raise LayoutError(
            f"'language' is {written!r}{nearest(str(written), ALIASES)}; it is python, c, cpp or javascript"
        )
    return language


def _packages(info: Mapping[str, Any], language: str) -> tuple[str, ...]:
    names = info.get("packages", [])
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise LayoutError(f"'packages' is a list of names such as [numpy], not {names!r}")
    for name in names:
        if name not in PACKAGES:
            raise LayoutError(f"'packages' has {name!r}{nearest(name, PACKAGES)}; it may have {', '.join(PACKAGES)}")
    if names and language != "python":
        raise LayoutError(f"'packages' are for Python, not for {language}")
    return tuple(sorted(set(names)))


def _lacks(info: Mapping[str, Any], language: str, packages: Sequence[str]) -> str:
    names = ("setup", "test", "checker", "property", *(("prelude",) if language == "python" else ()))
    texts = [(name, info[name]) for name in names if isinstance(info.get(name), str)]
    if info["kind"] == "asserts":
        texts += [(f"tests[{number}]", test.strip()) for number, test in enumerate(info["tests"])]
    for place, text in texts:
        # Parsing an EvalPlus test takes a second; most have no import.
        if "import" in text and (module := missing_module(statements(text), packages)) is not None:
            if module.partition(".")[0] in PACKAGES:
                remedy = "add packages: [numpy]"
            else:
                remedy = "take the import out"
            return f"{place} imports {module!r}, which is not in the sandbox: {remedy}"
    return ""


def _cases(
    info: Mapping[str, Any], build: Callable[[Mapping[str, Any], str, float], Case], keep_null: bool = False
) -> list[Case]:
    rows = info.get("cases")
    if not isinstance(rows, (list, tuple)) or not rows:
        raise LayoutError(
            f"'cases' is a list of objects, one at least, not {'empty' if rows == [] else type(rows).__name__}"
        )
    cases = []
    for number, row in enumerate(rows):
        place = f"cases[{number}]"
        if not isinstance(row, Mapping):
            raise LayoutError(f"{place} is an object, not {type(row).__name__}")
        weight = row.get("weight")
        # For printed texts null is as good as absent; for functions null is a value (`None` is expected).
        if not keep_null:
            row = {name: value for name, value in row.items() if value is not None}
        cases.append(build(row, place, read_weight(1.0 if weight is None else weight, place)))
    return cases


def _parsed(info: Mapping[str, Any], name: str, default: str | None = None) -> str:
    code = read_text(info, name, default)
    _statements(code, name)
    return code


def _statements(code: str, place: str) -> list[ast.stmt]:
    try:
        # Tests of MBPP and its relatives come with indents and line ends around them.
        body = statements(code.strip() if place.startswith("tests") else code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LayoutError(f"{place} is no Python: {error}") from None
    if text := always_true(body):
        raise LayoutError(
            f"{place}: `{short(text)}` is always true; write the condition and its message without brackets"
        )
    return body


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _strays(test: str) -> bool:
    """Return True if a HumanEval test does more than define `check` and constants."""
    return any(
        not isinstance(node, (ast.FunctionDef, ast.Assign, ast.Import, ast.ImportFrom)) and not _is_text(node)
        for node in statements(test)
    )


def _apart(source: str, entry: str, place: str, kinds: Mapping[str, str] | None = None, changes: bool = True) -> str:
    """A test as it runs apart from the program, of which it has the `entry`, and the names in `kinds`. LayoutError
    where it uses what nothing defines, or what cannot be had apart."""
    body = statements(source)
    # Names that the test does not use get no proxy: each is a line in front of the test.
    used = {name: kind for name, kind in (kinds or {}).items() if uses(body, {name})}
    if kinds is not None:
        used |= {name: "exception" for name in exceptions(body) - bound(body) if missing(body, {*used, entry}) == name}
    if name := missing(body, {*used, entry}):
        raise LayoutError(
            f"{place} uses {name!r}, which neither it nor the setup defines, and cannot be rewritten as a comparison "
            "of calls: define or import it in the setup, or compare the results of one function"
        )
    if name := captures(body):
        raise LayoutError(
            f"{place} uses {name!r}, but the program reads and prints in a process of its own: compare what it "
            "returns, or use kind 'stdio'"
        )
    own = naming({name: kind for name, kind in used.items() if name != entry or kind != "function"})
    # In front of the test: imports that the harnesses of the field give, then the proxies, which win where a name is
    # both.
    before = "\n".join(part for part in (imports_for(body, {*used, entry}), own) if part)
    return assembled(with_changes(source) if changes else source, before)
