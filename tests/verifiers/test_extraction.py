import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.verifiers.extraction import METHODS, extract_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{41}, no: \boxed{42}", "42"),
        (r"\fbox{ 42 }", "42"),
        (r"\boxed {\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1 \\{2}}", r"1 \\{2}"),
        (r"\boxed{41 \boxed{42}}", r"41 \boxed{42}"),
        (r"\boxed{41} and then \boxed{4", "41"),
        (r"a stray } and { here, \boxed{42}", "42"),
        (r"the final answer is $42$. \boxed{41}", "41"),
        ("<answer>41</answer>\n#### 42", "42"),
        ("<answer>40</answer> <answer> 42 </answer>", "42"),
        ("reasoning\n#### 41\nmore\n#### 42\nrest", "42"),
        ("The answer is 42. I hope it is correct.", "42"),
        ("The final answer is: $3.14$.", "$3.14$"),
        ("**Final Answer:** 42", "42"),
        ("Answer: \\[\n 9 \n\\] done", "\\[\n 9 \n\\] done"),
        ("the answer is 41. No, the answer is 42", "42"),
        (r"\boxed{} the answer is 42", "42"),
        (r"<think>\boxed{41}</think> \boxed{42}", "42"),
        (r"thought \boxed{41}</think>The answer is 42.", "42"),
        (r"<think>\boxed{42}</think> I do not know", None),
        (r"<think>\boxed{42}", None),
        (r"<think>a</think> \boxed{41} <think> \boxed{42}", None),
        ("it is 42", None),
        ("", None),
        ("####", None),
        (r"\boxed{42", None),
        ("<answer>42", None),
    ],
)
def test_the_answer_is_found_where_the_policy_says(completion, answer):
    assert extract_answer(completion) == answer


def test_fallbacks_and_methods_are_choices():
    assert extract_answer("first 1,200 then -3.5 apples", fallback="last_number") == "-3.5"
    assert extract_answer("10-7", fallback="last_number") == "7"
    assert extract_answer(" 6 apples ", fallback="whole") == "6 apples"
    assert extract_answer(r"\boxed{1} #### 2", methods=("hash",)) == "2"
    assert extract_answer(r"\boxed{42}", think_opened_by_prompt=True) is None
    assert extract_answer(r"</think>\boxed{42}", think_opened_by_prompt=True) == "42"


PIECES = [
    "\\boxed{",
    "\\fbox",
    "{",
    "}",
    "\\",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "####",
    "answer is",
    "$$",
    "\n",
    "4",
    ".",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_raises_and_an_answer_is_part_of_it(text):
    for fallback in ("none", "last_number", "whole"):
        answer = extract_answer(text, fallback=fallback)
        assert answer is None or (answer and answer in text)


@pytest.mark.parametrize("piece", [*PIECES, "\\boxed{}", "\\boxed ", "answer ", "answer: ", " ", "9", "9,", "$$a"])
def test_a_megabyte_of_anything_takes_linear_time(piece):
    text = "\\boxed{1}" + piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    for method in METHODS:
        extract_answer(text, methods=(method,), fallback="last_number")
    assert time.perf_counter() - start < 30  # a quadratic pass takes hours
