"""Numbers in texts of many scripts: the fallback `last_number` of the extraction, and how `math` reads what it finds."""

# ruff: noqa: RUF001 - characters that look like ASCII are what is tested

import pytest

from rlvr.records import Task
from rlvr.verifiers import MathVerifier
from rlvr.verifiers.extraction import extract_answer

RIGHT = [
    ("答案是42。", "42"),
    ("所以答案为-5，谢谢", "-5"),
    ("共有１２３４个", "1234"),
    ("合计1,234元", "1234"),
    ("约为３．１４", "3.14"),
    ("答えは42です。", "42"),
    ("答えは−5です", "-5"),
    ("答えは４２円です", "42"),
    ("답은 42입니다.", "42"),
    ("답은42입니다", "42"),
    ("정답은 3.5개", "3.5"),
    ("Ответ: 42.", "42"),
    ("Ответ: 3,14", "3.14"),
    ("всего 1 000 рублей", "1000"),
    ("всего 1 000 000", "1000000"),
    ("получаем −7", "-7"),
    ("الجواب ٤٢", "42"),
    ("الجواب هو ٣٫١٤", "3.14"),
    ("الناتج ١٬٢٣٤", "1234"),
    ("الجواب ۴۲", "42"),
    ("उत्तर ४२ है", "42"),
    ("共42万元", "420000"),
    ("共42万", "420000"),
    ("25％", "25%"),
    ("答案是1/2", "1/2"),
    ("第3步得到x2", "3"),
    ("等于 42 (四十二)", "42"),
    ("итого −5,5 м", "-5.5"),
    ("\\boxed{42万元}", "420000"),
    ("\\boxed{42元}", "42"),
    ("합은 5만 원", "50000"),
    ("Сумма равна 12.", "12"),
    ("答案是７，８", "8"),
    ("总数为1，234", "1234"),
    ("x1=5以及x2", "5"),
    ("ответ 5 тысяч", "5000"),
    ("答案是10。第2种", "2"),
    ("5人中3人", "3"),
]
WRONG = [
    ("答案是42万", "43"),
    ("共42万", "42"),
    ("所以答案为-5", "5"),
    ("答えは−5です", "5"),
    ("الجواب هو ٣٫١٤", "314"),
    ("总数为1，234", "1"),
    ("Ответ: 3,14", "314"),
    ("всего 1 000", "0"),
    ("答案是42。不对，是41。", "42"),
    ("\\boxed{42万元}", "43"),
    ("第42步得到x2", "2"),
]


def score(text, gold):
    return MathVerifier(fallback="last_number").verify(Task("t", "", gold), text).score


@pytest.mark.parametrize(("text", "gold"), RIGHT)
def test_the_last_number_is_read_in_its_script(text, gold):
    assert score(text, gold) == 1, extract_answer(text, fallback="last_number")


@pytest.mark.parametrize(("text", "gold"), WRONG)
def test_no_other_number_is_read(text, gold):
    assert score(text, gold) == 0, extract_answer(text, fallback="last_number")
