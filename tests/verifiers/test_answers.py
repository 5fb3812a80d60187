import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.verifiers.answers import METHODS, extract_answer


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
        (r"\\boxed{41}, no: \\boxed{42}", "42"),
        (r"so \boxed{185\}$.", "185"),
        ("#### Step 1: add\nThe answer is 42.", "42"),
        ("#### 2. Conclusion\nThe answer is 42.", "42"),
        ("#### Final Answer: 42", "42"),
        ("The answer is 42. I hope the answer is correct.", "42"),
        ("Final Answer: The largest $n$ is 34. I hope it is correct.", "34"),
        ("<reasoning>\\boxed{41}</reasoning> the answer is 42", "42"),
        ("[THINK]\\boxed{41}[/THINK] \\boxed{42}", "42"),
        ("</think> 1 <thinking> \\boxed{42}", None),
    ],
)
def test_the_answer_is_found_where_the_policy_says(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"\( \boxed{1} \) and \( \boxed{2} \)", "1, 2"),
        (r"$\boxed{1} \quad \text{and} \quad \boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"$y_1 = \boxed{1}$ and $y_2 = \boxed{2}$", "1, 2"),
        (r"\boxed{41} or \boxed{42}", "41 or 42"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} and therefore \boxed{2}", "2"),
        (r"the radius is \boxed{1}. \boxed{2}", "2"),
        (r"\boxed{1} no no \boxed{2}, \boxed{3}", "2, 3"),
    ],
)
def test_boxes_joined_by_a_bare_word_are_one_answer_of_several_parts(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{41}<|im_end|>", "41"),
        (r"\boxed{41}<|im_end|><|im_start|>assistant \boxed{42}", "41"),
        ("<|im_end|>\n<|im_start|>assistant\n\\boxed{42}", None),
        (r"<|im_start|>assistant \boxed{42}<|im_end|>", "42"),
        (r"\boxed{41}</s>[INST] and now? [/INST]\boxed{42}", "41"),
        (r"<|start_header_id|>assistant<|end_header_id|> \boxed{42}<|eot_id|>", "42"),
        (r"\boxed{4<|im_end|>2}", None),
        (r"|x| < |y| and \boxed{a<|b|}", "a<|b|"),
    ],
)
def test_what_follows_an_end_of_turn_or_a_role_token_was_not_said_by_the_assistant(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "formula", "number"),
    [
        ("so $x = 2$ and $y = 3$.", "y = 3", "y = 3"),
        ("so $x = 2$, which is 3 more", "x = 2", "3"),
        ("it grows by 100%.", None, "100%"),
        (r"a \[ 9 \] b", "9", "9"),
        (r"it costs \$5 in all", None, "5"),
        ("the sum $1 +\n 2$", None, "2"),
        ("12 apples", None, "12"),
        ("nothing", None, None),
        (r"\frac{1}{2}", r"\frac{1}{2}", r"\frac{1}{2}"),
        ("The answer is $42$.", "$42$", "$42$"),
    ],
)
def test_the_fallbacks_take_the_last_formula_or_number(text, formula, number):
    assert extract_answer(text, fallback="last_formula") == formula
    assert extract_answer(text, fallback="last_number") == number


def test_fallbacks_and_methods_are_choices():
    assert extract_answer("first 1,200 then -3.5 apples", fallback="last_number") == "-3.5"
    assert extract_answer("10-7", fallback="last_number") == "10-7"
    assert extract_answer("it is 10-7", fallback="last_number") == "7"
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
    "<|im_end|>",
    "<|",
    " and ",
    ", ",
    "<answer>",
    "</answer>",
    "####",
    "answer is",
    "$$",
    "\n",
    "4",
    ".",
]


def parts_of(answer):
    return [part for item in answer.split(", ") for part in item.split(" or ")]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_raises_and_an_answer_is_part_of_it(text):
    for fallback in ("none", "last_formula", "whole"):
        answer = extract_answer(text, fallback=fallback)
        assert answer is None or (answer and all(part in text for part in parts_of(answer)))


@pytest.mark.parametrize("piece", [*PIECES, "\\boxed{}", "\\boxed ", "answer ", "answer: ", " ", "9", "9,", "$$a"])
def test_a_megabyte_of_anything_takes_linear_time(piece):
    text = "\\boxed{1}" + piece * (10_000_000 // len(piece))
    start = time.perf_counter()
    for method in METHODS:
        extract_answer(text, methods=(method,), fallback="last_number")
    assert time.perf_counter() - start < 30  # a quadratic pass takes days


def test_the_answer_is_looked_for_at_the_end():
    assert extract_answer("x" * 10**7 + r"\boxed{42}") == "42"
    assert extract_answer("<think>" + "x" * 10**7 + r"\boxed{42}") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is false that the answer is 5.", None),
        ("It is not the case that the answer is 5.", None),
        ("If the answer is 5, we are done.", None),
        ("Suppose the answer is 5.", None),
        ("Some say the answer is 5.", None),
        ("I doubt that the correct answer is 5.", None),
        ("The answer is 4. It is false that the answer is 5.", "4"),
        ("The least likely answer is 5.", None),
        ("The least possible answer is 5.", "5"),
        ("The answer is 4. The tempting answer is 5.", "4"),
        ("I think the answer is 5.", "5"),
        ("It is false. The answer is 5.", "5"),
        ("We check if it holds: the answer is 5.", "5"),
        ("The answer is 5... or maybe 6.", "5... or maybe 6"),
        ("The answer is: A is more likely than B.", "A is more likely than B"),
    ],
)
def test_an_answer_that_is_denied_supposed_or_reported_is_none(text, answer):
    assert extract_answer(text) == answer
