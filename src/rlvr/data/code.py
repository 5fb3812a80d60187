"""Rows of the field's data sets of programming tasks -> our columns, for the verifier `code`.

Recognised by their columns:

- HumanEval, HumanEval+: `prompt`, `entry_point`, `test`, `canonical_solution`
- MBPP, MBPP+: `text` or `prompt`, `test_list`, `code`, `test_setup_code` or `test_imports`, of MBPP+ also `test`; the
  prompt shows the first test only, since a policy writes down the answers of the tests that it sees
- APPS, TACO: `question`, `input_output` (`inputs`, `outputs`, `fn_name`), `solutions`, TACO's `time_limit` and
  `memory_limit`
- CodeContests: `description`, `public_tests`, `private_tests`, `generated_tests`, `time_limit`, `memory_limit_bytes`
- LiveCodeBench: `question_content`, `public_test_cases`, `private_test_cases`, `metadata`
- verl: a `ground_truth` that is JSON of `inputs` and `outputs` (PRIME's layout too, with `fn_name`), or of
  `assert_case`
- open-instruct: `messages` and a `ground_truth` that is a list of assertions, or of `input` and `output`

Invariants: a row of no such layout comes back as it was; what is packed in text is read as JSON or as Python literals,
and never unpickled to anything but text.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from rlvr.errors import DataError

Row = dict[str, Any]


class NoTestsError(DataError):
    """A programming task without test cases, as APPS and CodeContests have some: no answer to it can be judged."""


VERIFIER = "code"
_NO_TESTS = "this programming task has no test cases; remove the row"
# 1 GiB by choice, a guard against compressed data that unfolds without end.
MAX_UNPACKED = 1 << 30
"""Bytes of one row's packed test cases."""

_CONTESTS = {1: "codechef", 2: "codeforces", 3: "hackerearth", 4: "codejam", 6: "atcoder", 7: "aizu", 0: "unknown"}
"""CodeContests writes a contest as the number of an enum (contest_problem.proto)."""
_APPS_SECONDS = 4.0
"""Seconds that the harness of APPS gives every program (eval/testing_util.py): the contests' own limits are those of
C++."""
_SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 0.001, "milliseconds": 0.001}
_MEGABYTES = {
    "mb": 1.0,
    "megabyte": 1.0,
    "megabytes": 1.0,
    "gb": 1024.0,
    "gigabytes": 1024.0,
    "bytes": 2**-20,
    "kb": 2**-10,
}

# By choice: 10 ms for each input, 5 s for each megabyte of the test, and 2 s beside, as docs/code.md says.
_CALL_SECONDS = 0.01
"""For each input of an EvalPlus test, whose calls all go through the trainer in one run ..."""
_BYTE_SECONDS = 5e-6
"""... and for each byte of it, which is compiled in that run, beside ..."""
_BASE_SECONDS = 2.0
# Strings first, so that brackets and commas inside them do not count: of `[1, "a,b", (2, 3)]` it gives the outer
# brackets, the string, the tuple's brackets and every other comma.
_TOKENS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\[\](){},]")
# Matches `np.allclose(out, exp, rtol=1e-07, atol=atol)`, as the copies of HumanEval+ and MBPP+ on the hub have it.
_ALL_CLOSE = re.compile(r"\bnp\.allclose\(\s*out\s*,\s*exp\s*,\s*rtol=1e-0?7\s*,\s*atol=(\w+)\s*\)")
_SAME_NUMBERS = """
def same_numbers(out, exp, atol):
    if hasattr(out, "tolist"):
        out = out.tolist()
    if isinstance(exp, (list, tuple)):
        same_length = isinstance(out, (list, tuple)) and len(out) == len(exp)
        return same_length and all(same_numbers(o, e, atol) for o, e in zip(out, exp))
    if type(out) not in (bool, int, float, complex):
        return False
    if out == exp or (out != out and exp != exp):
        return True
    return abs(out - exp) <= atol + 1e-07 * abs(exp) < float("inf")


"""
"""In place of the `np.allclose` of EvalPlus' tests on the hub, which broadcasts: it takes [] for 1.5, and 1.5 for [1.5,
1.5]. The distance is that of `np.testing.assert_allclose` in `evalplus/eval/__init__.py`, and a tuple is a list there
too."""

_ASK = (
    "Write a Python program that reads from standard input and prints to standard output. Put it into one "
    "```python block."
)
_ASK_FUNCTION = "Put the whole code into one ```python block."


def as_code_row(row: Row, place: str) -> Row | None:
    """The row with our columns in place of a code layout's, or None where it has none. DataError names the place;
    NoTestsError, which is one, for a task that nothing can be tried on."""
    if row.get("kind") is not None:  # ours already
        return None
    # In order: the special layouts before the general ones, which share their columns.
    for columns, read in _LAYOUTS:
        if all(row.get(column) is not None for column in columns):
            try:
                converted = read(dict(row))
            except NoTestsError as error:
                raise NoTestsError(f"{place}: {error}") from None
            # What reading foreign text may raise; json.JSONDecodeError and UnicodeDecodeError are ValueErrors.
            except (ValueError, TypeError, KeyError, LookupError, zlib.error, pickle.UnpicklingError) as error:
                raise DataError(
                    f"{place}: the columns {', '.join(columns)} look like a programming task, but cannot be read "
                    f"({type(error).__name__}: {error}); map the fields if they mean something else"
                ) from error
            if converted is not None:
                return {"verifier": VERIFIER, **converted}
    return None


def tests_of(graded: Any) -> dict[str, Any] | None:
    """Return the program tests in a `ground_truth` of verl or open-instruct; None where it holds none."""
    value = graded
    if isinstance(graded, str):
        # Most references are numbers or words, and need not go through a parser.
        if graded[:1] not in ("{", "["):
            return None
        try:
            value = json.loads(graded)
        except ValueError:
            return None
    if isinstance(value, Mapping):
        if isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
            return _in_and_out(value)
        if isinstance(asserts := value.get("assert_case"), list) and asserts:
            return {"kind": "asserts", "tests": asserts}
        return None
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(one, str) and one.lstrip().startswith("assert ") for one in value):
        return {"kind": "asserts", "tests": value}
    if all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in value):
        return {"kind": "stdio", "cases": [{"input": one["input"], "output": one["output"]} for one in value]}
    return None


def _humaneval(row: Row) -> Row:
    stub = row.pop("prompt")
    test = _with_shapes(row.pop("test"))
    info = {"kind": "humaneval", "prompt": stub, "entry_point": row.pop("entry_point"), "test": test}
    info["packages"] = _packages(test)
    info["time_limit"] = _seconds_for(test)
    if (solution := row.pop("canonical_solution", None)) is not None:
        info["solution"] = stub + solution
    prompt = f"Complete this function. {_ASK_FUNCTION}\n\n```python\n{stub.rstrip()}\n```"
    return _with(row, prompt, info, "task_id")


def _mbpp(row: Row) -> Row:
    question = row.pop("text", None) or row.pop("prompt")
    tests = [*row.pop("test_list"), *(row.pop("challenge_test_list", None) or [])]
    imports = row.pop("test_imports", None) or []
    setup = "\n".join([*imports, row.pop("test_setup_code", None) or ""]).strip()
    if plus := row.pop("test", None):  # of MBPP+: a script with many more inputs
        tests.append(_with_shapes(plus))
    info = {"kind": "asserts", "tests": tests, "setup": setup, "solution": row.pop("code", None)}
    info["packages"] = _packages("\n".join([setup, *tests]))
    info["time_limit"] = _seconds_for(tests[-1])
    info["entry_point"] = _first_called(tests[0], info["solution"] or "")
    prompt = f"{question.strip()} {_ASK_FUNCTION}\n\nIt must pass tests such as:\n```python\n{tests[0]}\n```"
    return _with(row, prompt, info, "task_id")


def _first_called(test: str, solution: str) -> str | None:
    """The name that a solution defines and a test calls first: some tasks ask for a function that is called `sum`."""
    defined = re.findall(r"^(?:def|class)[ \t]+(\w+)", solution, re.MULTILINE)
    # In `assert is_prime(7)` the name before the bracket; a call of `set(...)` around it is not one that the solution
    # defines.
    return next((name for name in re.findall(r"(\w+)[ \t]*\(", test) if name in defined), None)


def _with_shapes(test: str) -> str:
    """An EvalPlus test whose comparison of floats looks at lengths, too; any other as it is."""
    text, replaced = _ALL_CLOSE.subn(r"same_numbers(out, exp, \1)", test)
    return _SAME_NUMBERS + text if replaced else test


def _seconds_for(test: str) -> float | None:
    """The limit of time of a test with a list of `inputs`, which are all tried in one run; None for any other."""
    # Matches `inputs = [[1, 2], [3]]` at the begin of a line; not `test_inputs = [`, and not `inputs = load()`.
    match = re.search(r"^[ \t]*inputs = (?=\[)", test, re.MULTILINE)
    if match is None:
        return None
    depth = inputs = 0
    for token in _TOKENS.finditer(test, match.end()):
        depth += (token[0] in "[({") - (token[0] in "])}")
        # Commas at depth 1 are those between the inputs: n inputs have n - 1.
        inputs += depth == 1 and token[0] == ","
        if depth == 0:
            break
    return _BASE_SECONDS + _CALL_SECONDS * (inputs + 1) + _BYTE_SECONDS * len(test)


def _packages(tests: str) -> list[str] | None:
    """Return the packages that a data set's tests import: numpy, with which EvalPlus compares."""
    if re.search(r"^(?:import|from) numpy\b", tests, re.MULTILINE):
        return ["numpy"]
    return None


def _apps(row: Row) -> Row:
    packed = row.pop("input_output")
    solutions = row.pop("solutions", None)
    if packed == "":
        raise NoTestsError(_NO_TESTS)
    info = _in_place(_in_and_out(json.loads(packed) if isinstance(packed, str) else packed), row.get("starter_code"))
    # A text in JSON, or a list already.
    if isinstance(solutions, str) and solutions:
        solutions = json.loads(solutions)
    info["solution"] = solutions[0] if solutions else None
    if seconds := _quantity(row.pop("time_limit", None), _SECONDS):
        # A limit that was set for C++ is too short for the same algorithm in Python.
        info["time_limit"] = max(seconds, _APPS_SECONDS)
    if megabytes := _quantity(row.pop("memory_limit", None), _MEGABYTES):
        info["memory_mb"] = megabytes
    return _with(row, _asked(row.pop("question"), info, row.pop("starter_code", None)), info, "problem_id")


def _quantity(written: Any, units: Mapping[str, float]) -> float | None:
    """A limit of TACO in our unit: `2.0 seconds`, `256.0 megabytes`; None where it is not known or written
    otherwise."""
    match = None
    if isinstance(written, str):
        # Matches `2.0 seconds`, `256 megabytes`, `1000ms`; not `2.0 - 3.0 seconds`, which is taken for no limit.
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", written.strip().casefold())
    if match is None or match[2] not in units:
        return None
    # 0 means that no limit is known.
    return float(match[1]) * units[match[2]] or None


def _codecontests(row: Row) -> Row:
    columns = [row.pop(name, None) or {} for name in ("public_tests", "private_tests", "generated_tests")]
    pairs = [pair for one in columns for pair in zip(one.get("input", ()), one.get("output", ()), strict=True)]
    if not pairs:
        raise NoTestsError(_NO_TESTS)
    # The generated tests repeat public ones.
    info: dict[str, Any] = {"kind": "stdio", "cases": [{"input": i, "output": o} for i, o in dict.fromkeys(pairs)]}
    info["comparison"] = {"ignore_case": True}  # as its own harness does (execution/tester_sandboxer.cc)
    if limit := row.pop("time_limit", None):
        info["time_limit"] = limit.get("seconds", 0) + limit.get("nanos", 0) / 1e9 or None
    if memory := row.pop("memory_limit_bytes", None):
        info["memory_mb"] = max(64, memory // 2**20)
    solutions = row.pop("solutions", None) or {}
    # 3 is PYTHON3 in the enum of contest_problem.proto; solutions in other languages cannot be run here.
    by_language = zip(solutions.get("language", ()), solutions.get("solution", ()), strict=False)
    info["solution"] = next((text for language, text in by_language if language in (3, "PYTHON3")), None)
    row.pop("incorrect_solutions", None)
    if (source := row.get("source")) in _CONTESTS:
        row["source"] = _CONTESTS[source]
    return _with(row, _asked(row.pop("description"), info), info, "name")


def _livecodebench(row: Row) -> Row:
    metadata = row.pop("metadata", None) or "{}"
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    tests = [*_unpacked(row.pop("public_test_cases")), *_unpacked(row.pop("private_test_cases", None) or "[]")]
    value = {"inputs": [t["input"] for t in tests], "outputs": [t["output"] for t in tests]}
    if metadata.get("func_name"):
        value["fn_name"] = metadata["func_name"]
    info = _in_place(_in_and_out(value), row.get("starter_code"))
    return _with(row, _asked(row.pop("question_content"), info, row.pop("starter_code", None)), info, "question_id")


def _verl(row: Row) -> Row | None:
    # Not every row of verl's layout is a programming task: then it is left to `row_adapters`.
    graded = row["reward_model"]
    info = None
    if isinstance(graded, Mapping):
        info = tests_of(graded.get("ground_truth"))
    if info is None:
        return None
    extra = dict(row.pop("extra_info", None) or {})
    source = row.pop("data_source", None)
    row.pop("reward_model")
    return {**row, "source": source, "info": {**extra, **info}}


def _graded_list(row: Row) -> Row | None:
    info = tests_of(row["ground_truth"])
    if info is None:
        return None
    row.pop("ground_truth")
    return {**row, "info": {**dict(row.get("info") or {}), **info}}


def _in_and_out(value: Mapping[str, Any]) -> dict[str, Any]:
    """The cases of paired `inputs` and `outputs`: of a function where there is `fn_name`, else of a program."""
    pairs = list(zip(value["inputs"], value["outputs"], strict=True))
    if not pairs:
        raise NoTestsError(_NO_TESTS)
    if not (name := value.get("fn_name")):
        texts = [{"input": _lines(i), "output": _lines(o)} for i, o in pairs]
        return {"kind": "stdio", "cases": texts, "harness": "livecodebench"}
    # A list of arguments is the form of APPS, which wraps what a function returns in a list (eval/testing_util.py).
    wrapped = all(isinstance(i, list) and isinstance(o, list) and len(o) == 1 for i, o in pairs)
    cases = [{"args": _arguments(i), "expected": o[0] if wrapped else _returned(i, o)} for i, o in pairs]
    return {"kind": "function", "name": name, "cases": cases}


def _returned(arguments: Any, output: Any) -> Any:
    """The value that a call returns: written as text where its arguments are, as by LiveCodeBench and verl
    (`lcb_runner/evaluation/testing_util.py`, `reward_score/prime_code/testing_util.py`), else as it stands."""
    if isinstance(arguments, str):
        return _value(output)
    return output


def _in_place(info: dict[str, Any], starter: Any) -> dict[str, Any]:
    """The info of a function. Where LeetCode's stub returns None and a value is expected, it is what the first argument
    holds then."""
    if info["kind"] != "function" or all(case["expected"] is None for case in info["cases"]):
        return info
    # Matches `def rotate(self, matrix: List[List[int]]) -> None:`; it does not run on into the next `def`.
    signature = rf"\bdef[ \t]+{re.escape(info['name'])}[ \t]*\((?:(?!\bdef\b).)*?\)[ \t]*->[ \t]*None[ \t]*:"
    returns_none = isinstance(starter, str) and re.search(signature, starter, re.DOTALL)
    if returns_none:
        return {**info, "result_argument": 0}
    return info


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _arguments(value: Any) -> list[Any]:
    """A call's arguments: a list of them, or text with one in each line."""
    if isinstance(value, str):
        return [_value(line) for line in value.split("\n") if line]
    return list(value)


def _value(text: Any) -> Any:
    """A value that is written as JSON, or else as a Python literal; anything but text is one already."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text


class _TextOnly(pickle.Unpickler):
    """Reads pickled text; anything that would have to be imported is refused."""

    def find_class(self, module: str, name: str) -> Any:
        # A pickle names functions to call when it is read; text needs none, so every name is refused.
        raise pickle.UnpicklingError(f"a packed test case wants {module}.{name}")


def _unpacked(tests: Any) -> list[Any]:
    """LiveCodeBench's test cases: JSON, or JSON as pickled text, compressed, in base 64."""
    if not isinstance(tests, str):
        return list(tests)
    if tests.lstrip()[:1] != "[":
        inflate = zlib.decompressobj()
        # `zlib.decompress` has no limit on what it returns.
        data = inflate.decompress(base64.b64decode(tests), MAX_UNPACKED)
        if inflate.unconsumed_tail:
            raise ValueError(f"the packed test cases are larger than {MAX_UNPACKED} bytes")
        tests = _TextOnly(io.BytesIO(data)).load()
    return list(json.loads(tests))


def _asked(question: str, info: Mapping[str, Any], starter: str | None = None) -> str:
    """The question, and in which form the answer is wanted."""
    if info["kind"] == "stdio":
        return f"{question.strip()}\n\n{_ASK}"
    started = ""
    if starter and starter.strip():
        started = f" Go on from:\n```python\n{starter.rstrip()}\n```"
    return f"{question.strip()}\n\nWrite the Python function `{info['name']}`. {_ASK_FUNCTION}{started}"


def _with(row: Row, question: str, info: Mapping[str, Any], id_column: str) -> Row:
    row_id = row.pop(id_column, None)
    if row_id is None or row.get("id") is not None:
        named = {}
    else:
        named = {"id": row_id}
    # An absent key means the default of the verifier.
    kept = {name: value for name, value in info.items() if value not in (None, "")}
    return {**row, **named, "prompt": [{"role": "user", "content": question}], "info": kept}


_LAYOUTS: tuple[tuple[tuple[str, ...], Callable[[Row], Row | None]], ...] = (
    (("prompt", "entry_point", "test"), _humaneval),
    (("test_list",), _mbpp),
    (("question", "input_output"), _apps),
    *((("description", tests), _codecontests) for tests in ("public_tests", "private_tests", "generated_tests")),
    (("question_content", "public_test_cases"), _livecodebench),
    (("reward_model", "prompt"), _verl),
    (("messages", "ground_truth"), _graded_list),
    (("prompt", "ground_truth"), _graded_list),
)
