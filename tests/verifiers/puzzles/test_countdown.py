import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr import registry
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.puzzles.countdown import CountdownVerifier
from rlvr.verifiers.puzzles.expressions import Expression, read_expression


def judge(answer, numbers=(25, 3, 4, 50), target=53, gold=None, **options):
    task = Task("t", "p", gold, info={"numbers": list(numbers), **({} if target is None else {"target": target})})
    return CountdownVerifier(**options).quick(task, f"<think>hm</think><answer>{answer}</answer>")


def test_rules_of_the_game():
    assert judge("50 + 3 * (25 - 24)").score == 0
    for right in (
        "25 * 4 - 50 + 3",
        "(25*4)-50+3",
        "25 * 4 - 50 + 3 = 53",
        "25 \\times 4 - 50 + 3",
        "25\u00d74\u221250+3",
        "$25 \\cdot 4 - 50 + 3$",
        "\\boxed{25*4-50+3}",
        "[25*4]-(50-3)",
        "25 * 4 - 50 + 3.",
        "\\left(25 \\cdot 4\\right) - (50 - 3)",
    ):
        assert judge(right).score == 1, right
    for wrong in (
        "50 + 3",
        "25 * 4 - 50 + 3 + 0",
        "53",
        "25*4-50+3 = 54",
        "53 = 25*4-50+3",
        "25*4 = 100 - 50 + 3",
        "25*4-50+3 = 53 = 53",
        "50 + 3 + 25 - 25",
        "25 + 4 + 50 + 3",
        "",
        "banana",
        "-50 + 25*4 + 3",
        "25*4-50--3",
        "+25*4-50+3",
        "25*4-50+3^1",
        "25*4-50+3**1",
        "25*4-50+3!",
        "25(4)-50+3",
        "25*4-50+3.0",
        "25*4-50+03",
        "(25*4-50+3",
        "25*4-50+3)",
        "()",
        "25*4-50+3 or 1",
        "25*4-50+3, 25*4-50+3",
        "254 - 503",
        "2 5*4-50+3",
        "25*4-50+3 \\boxed{}",
        "__import__('os')",
        "25//4-50+3",
        "25%4-50+3",
        "25*4-50+\u0663",
        "25*4-50+3/(4-4)",
    ):
        assert judge(wrong).score == 0, wrong


def test_digits_cannot_be_glued_and_powers_are_no_numbers():
    assert judge("42", (4, 2), 42).score == 0
    assert judge("4^2", (4, 2), 16).score == 0
    assert judge("9^9^9^9", (9, 9, 9, 9), 1).status == VerdictStatus.UNPARSABLE
    assert judge("4*2", (4, 2), 8).score == 1
    assert judge("4*2", (4, 2, 2), 8).score == 0
    assert judge("4*2", (4, 2, 2), 8, use="any").score == 1
    assert judge("4*2*2/2", (4, 2, 2), 8, use="any").score == 0


def test_the_24_game_is_exact():
    twenty_four = registry.build("verifier", {"name": "countdown", "target": 24})
    task = Task("t", "p", info={"numbers": [3, 3, 8, 8]})
    assert twenty_four.check_task(task) is None
    assert twenty_four.quick(task, "\\boxed{8 / (3 - 8/3)}").score == 1
    assert twenty_four.quick(task, "\\boxed{\\frac{8}{3 - \\frac{8}{3}}}").score == 1
    assert twenty_four.quick(task, "\\boxed{8 * 3}").score == 0
    assert judge("1/3*3", (1, 3, 3), 1).score == 1
    assert judge("8/3", (8, 3), 2.6666666666666665).score == 0
    assert judge("7*3", (7, 3), None, gold="21").score == 1


def test_options():
    assert judge("50 + 25 + 4 + 3", wrong_value_score=0.1).score == 0.1
    assert judge("50 + 25", wrong_value_score=0.1).score == 0
    assert judge("25 * 4 - 50 + 3", operators="+-").score == 0
    for bad in ({"operators": ""}, {"operators": "+^"}, {"wrong_value_score": 1.0}, {"wrong_value_score": -0.1}):
        with pytest.raises(ConfigError, match="countdown"):
            CountdownVerifier(**bad)
    same = CountdownVerifier().same_answer
    assert same("1+2", "2 + 1 = 3") and not same("1+2", "4") and same("x", " x") and not same("x", "1")


@pytest.mark.parametrize(
    ("numbers", "target"),
    [
        ([], 1),
        (["1"], 1),
        ([1.5], 1),
        ([-1], 1),
        ([True], 1),
        (5, 1),
        ([1], "x"),
        ([1], True),
        ([1], "9" * 99),
        ([1], "1/0"),
        (None, 1),
    ],
)
def test_bad_tasks_are_found(numbers, target):
    task = Task("t", "p", info={"numbers": numbers, "target": target})
    assert CountdownVerifier().check_task(task)
    assert CountdownVerifier().quick(task, "1").score is None
    assert "target" in CountdownVerifier().check_task(Task("t", "p", info={"numbers": [1]}))


TREES = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner, st.booleans()).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})" if t[3] else f"{t[0]}{t[1]}{t[2]}"
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(TREES)
def test_expressions_have_the_value_that_python_gives_them(text):
    import re

    try:
        expected = eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
    except ZeroDivisionError:
        assert read_expression(text) == "a division by zero"
        return
    result = read_expression(f" {text} ")
    assert isinstance(result, Expression)
    assert result.value == expected
    assert sorted(result.numbers) == sorted(int(number) for number in re.findall(r"\d+", text))
    assert judge(text, result.numbers, str(expected)).score == 1


@settings(deadline=None)
@given(st.text() | st.text("0123456789+-*/()=^ .\\{}", max_size=40))
def test_no_text_raises(text):
    assert judge(text).score in (0.0, 1.0)
    assert judge(text, (1, 2), 3, wrong_value_score=0.1).score in (0.0, 0.1, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10**6,
        "1+" * 500_000,
        "9" * 10**6,
        "\\frac{" * 170_000,
        "(" * 1900,
        "1+" * 990,
        "9*" * 990 + "9",
        "999999999999999999*" * 100,
        "\\frac{1}{" * 200,
        "-" * 1900,
    ],
)
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert judge(text).score == 0
    assert time.process_time() - start < 1
