"""Rows of the field's programming data sets: each becomes a task that the code verifier takes, with the right cases."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

from rlvr.data import functions, load_tasks, to_task
from rlvr.data.code import NoTestsError
from rlvr.errors import ConfigError, DataError
from rlvr.verifiers.code.compare import Comparison
from rlvr.verifiers.code.layouts import read_layout

CHAT = [{"role": "user", "content": "Add."}]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def f(x):\n    """Doubles."""\n',
    "entry_point": "f",
    "canonical_solution": "    return 2 * x\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n",
}
MBPP = {
    "task_id": 601,
    "text": "Write a function to double.",
    "code": "def f(x):\n    return 2 * x",
    "test_list": ["assert f(1) == 2", "assert f(2) == 4"],
    "test_setup_code": "",
    "challenge_test_list": ["assert f(3) == 6"],
}
SANITIZED = {
    "task_id": 2,
    "prompt": "Double.",
    "code": "c",
    "test_imports": ["import math"],
    "test_list": ["assert f(1)"],
}
APPS = {
    "problem_id": 1,
    "question": "Add.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
    "input_output": json.dumps({"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", "7\n"]}),
    "starter_code": "",
}
APPS_CALL = {
    "question": "Reverse.",
    "solutions": "",
    "input_output": json.dumps({"fn_name": "rev", "inputs": [["ab"], ["c"]], "outputs": [["ba"], ["c"]]}),
    "starter_code": "class Solution:\n    def rev(self, s):",
}
CONTESTS = {
    "name": "1_A",
    "description": "Add.",
    "public_tests": {"input": ["1 2"], "output": ["3"]},
    "private_tests": {"input": ["4 5"], "output": ["9"]},
    "generated_tests": {"input": ["1 2"], "output": ["3"]},
    "time_limit": {"seconds": 1, "nanos": 500000000},
    "memory_limit_bytes": 256000000,
    "solutions": {"language": [2, 3], "solution": ["int main", "print(3)"]},
    "incorrect_solutions": {"language": [3], "solution": ["x"]},
}
HIDDEN = json.dumps([{"input": "[1, 2]\n3", "output": "[4]", "testtype": "functional"}])
LIVE = {
    "question_content": "Add.",
    "question_id": "abc",
    "starter_code": "class Solution:\n    def add(self, a, b):",
    "public_test_cases": json.dumps([{"input": '"a"\n{"b": 1}', "output": "true", "testtype": "functional"}]),
    "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(HIDDEN))).decode(),
    "metadata": json.dumps({"func_name": "add"}),
}
PAIRS = {"inputs": ["1 2"], "outputs": ["3"]}


def graded(truth):
    return {"prompt": CHAT, "data_source": "taco", "reward_model": {"ground_truth": truth, "style": "rule"}}


def cases(row):
    """What the row's cases are, as the layout has them."""
    return to_task(row).info["cases"]


def test_humaneval():
    task = to_task(HUMANEVAL)
    assert (task.id, task.verifier) == ("HumanEval/0", "code")
    assert task.info["solution"] == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    assert HUMANEVAL["prompt"].rstrip() in task.prompt[0]["content"]
    assert "== 4" not in task.prompt[0]["content"]


def test_mbpp_shows_one_test_and_hides_the_others():
    task = to_task(MBPP)
    assert (task.id, task.info["tests"]) == ("601", [*MBPP["test_list"], "assert f(3) == 6"])
    assert "assert f(1) == 2" in task.prompt[0]["content"]
    assert "f(2)" not in task.prompt[0]["content"]
    assert to_task(SANITIZED).info["setup"] == "import math"
    named = {"code": "def helper(x): ...\ndef sum(a, b): return a + b", "test_list": ["assert isclose(sum(1, 2), 3)"]}
    assert to_task({**MBPP, **named}).info["entry_point"] == "sum"
    assert to_task(MBPP).info["entry_point"] == "f"
    assert "entry_point" not in to_task(SANITIZED).info  # its code defines nothing


def test_apps():
    task = to_task(APPS)
    assert cases(APPS) == [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n5", "output": "7\n"}]
    assert (task.id, task.info["solution"]) == ("1", json.loads(APPS["solutions"])[0])
    assert "standard input" in task.prompt[0]["content"]
    assert cases(APPS_CALL) == [{"args": ["ab"], "expected": "ba"}, {"args": ["c"], "expected": "c"}]
    assert to_task(APPS_CALL).info["name"] == "rev"
    assert APPS_CALL["starter_code"] in to_task(APPS_CALL).prompt[0]["content"]


def test_codecontests():
    info = to_task(CONTESTS).info
    assert info["cases"] == [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}]
    assert (info["time_limit"], info["memory_mb"], info["solution"]) == (1.5, 244, "print(3)")
    assert "incorrect_solutions" not in info


def test_livecodebench_with_packed_cases():
    assert cases(LIVE) == [
        {"args": ["a", {"b": 1}], "expected": True},
        {"args": [[1, 2], 3], "expected": [4]},
    ]
    stdin = {**LIVE, "metadata": "{}", "private_test_cases": "[]"}
    assert cases(stdin) == [{"input": '"a"\n{"b": 1}', "output": "true"}]


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (["3", "4"], ["[3]", "[4]"], [[3], [4]]),  # text: of LiveCodeBench and verl
        (["3", '"4"'], ['"3"', "4"], ["3", 4]),
        (["3"], [[3]], [[3]]),
        ([[3], [4]], [[3], [4]], [3, 4]),  # lists: of APPS and TACO
        ([[3], [4]], [[[3]], [[4]]], [[3], [4]]),
        ([[3], [4]], [[3], [4, 5]], [[3], [4, 5]]),
        ([["abc"], ["b"]], ["12", "true"], ["12", "true"]),
        ([["abc"], ["b"]], [["12"], ["[1]"]], ["12", "[1]"]),
    ],
)
def test_what_a_function_returns_is_read_as_its_arguments_are_written(inputs, outputs, expected):
    calls = {"fn_name": "f", "inputs": inputs, "outputs": outputs}
    for row in (graded(calls), {**APPS, "input_output": json.dumps(calls)}):
        assert [case["expected"] for case in cases(row)] == expected


class Evil:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_packed_cases_are_never_unpickled_to_anything_but_text(capsys):
    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(DataError, match=r"row.*public_test_cases.*wants builtins.print"):
        to_task({**LIVE, "private_test_cases": evil})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("pack", [json.dumps, lambda value: value])
def test_verl(pack):
    task = to_task({**graded(pack(PAIRS)), "extra_info": {"index": 3}})
    assert (task.verifier, task.source, task.prompt) == ("code", "taco", CHAT)
    stdio = {"kind": "stdio", "cases": [{"input": "1 2", "output": "3"}], "harness": "livecodebench"}
    assert task.info == {"index": 3, **stdio}
    call = {"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["3"]}
    assert cases(graded(pack(call))) == [{"args": [1, [2]], "expected": 3}]
    assert to_task(graded(pack({"assert_case": ["assert f(1)"]}))).info["tests"] == ["assert f(1)"]


@pytest.mark.parametrize("pack", [json.dumps, lambda value: value])
def test_open_instruct(pack):
    row = {"messages": CHAT, "ground_truth": pack(MBPP["test_list"]), "dataset": "code"}
    task = to_task(row)
    assert (task.verifier, task.prompt) == ("code", CHAT)
    assert task.info == {"kind": "asserts", "tests": MBPP["test_list"], "dataset": "code"}
    stdin = {**row, "ground_truth": pack([{"input": "1", "output": "2"}])}
    assert cases(stdin) == [{"input": "1", "output": "2"}]


@pytest.mark.parametrize("truth", ["4", "[1, 2]", "{1, 2}", '{"a": 1}', ["4"], "[]"])
def test_other_references_are_left_as_they_are(truth):
    assert to_task(graded(truth)).answer == truth
    assert to_task({"prompt": CHAT, "ground_truth": truth}).verifier is None


@pytest.mark.parametrize("row", [HUMANEVAL, MBPP, SANITIZED, APPS, APPS_CALL, CONTESTS, LIVE, graded(PAIRS)])
def test_every_layout_is_one_that_the_verifier_takes(row):
    task = to_task(row)
    assert read_layout(task.info, "python", Comparison(), task.prompt).cases
    assert to_task(task.to_json()) == task


@pytest.mark.parametrize(
    "row",
    [
        {**APPS, "input_output": "{"},
        {**APPS, "input_output": json.dumps({"inputs": ["1"], "outputs": []})},
        {**LIVE, "private_test_cases": "AAAA"},
        {**CONTESTS, "public_tests": {"input": ["1"], "output": []}},
    ],
)
def test_a_row_that_cannot_be_read_is_named(row):
    with pytest.raises(DataError, match=r"file, line 3: the columns .* look like a programming task"):
        to_task(row, place="file, line 3")


NOTHING: dict = {"input": [], "output": []}
WITHOUT_TESTS = [
    {**APPS, "input_output": ""},
    {**APPS, "input_output": json.dumps({"inputs": [], "outputs": []})},
    {**APPS_CALL, "input_output": json.dumps({"fn_name": "rev", "inputs": [], "outputs": []})},
    {**CONTESTS, "public_tests": NOTHING, "private_tests": NOTHING, "generated_tests": None},
    graded({"inputs": [], "outputs": []}),
]


def test_rows_without_test_cases_are_left_out_of_a_data_set_and_named(tmp_path, caplog):
    for row in WITHOUT_TESTS:
        with pytest.raises(NoTestsError, match="row 7: this programming task has no test cases"):
            to_task(row, place="row 7")
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, [APPS, *WITHOUT_TESTS, MBPP])))
    with caplog.at_level("WARNING", logger="rlvr"):
        assert [task.id for task in load_tasks(str(file))] == ["1", "601"]
    first, count = (record.getMessage() for record in caplog.records)
    assert "line 2: left out, a programming task without test cases" in first
    assert count.endswith(f"{len(WITHOUT_TESTS)} rows in all")


def test_codecontests_may_lack_a_column_of_tests():
    inputs = {"public_tests": ["4 5", "1 2"], "private_tests": ["1 2"], "generated_tests": ["1 2", "4 5"]}
    for absent, kept in inputs.items():
        assert [case["input"] for case in cases({**CONTESTS, absent: None})] == kept


def test_generated_functions_have_the_values_that_their_question_shows():
    tasks = list(functions(count=300))
    assert len({task.id for task in tasks}) == 300
    assert tasks[:100] == list(functions(count=100))
    for task in tasks:
        scope: dict = {}
        exec(task.demonstration, scope)  # ours
        question = task.prompt[0]["content"]
        shown = [int(part[2 : part.index(")")]) for part in question.split()]
        assert question == " ".join(f"f({x})={scope['f'](x)}" for x in shown)
        assert all(scope["f"](*case["args"]) == case["expected"] for case in task.info["cases"])
        assert not {x for case in task.info["cases"] for x in case["args"]} & set(shown)
    assert not {task.id for task in functions(count=80, split="eval")} & {task.id for task in tasks}
    with pytest.raises(ConfigError, match="too many"):
        list(functions(count=10_000))
    assert load_tasks({"name": "functions", "count": 3})[0].verifier == "code"
