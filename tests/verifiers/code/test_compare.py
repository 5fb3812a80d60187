"""Comparison of printed text and of values, by token, by type and with a tolerance."""

from __future__ import annotations

import pytest

from rlvr.errors import ConfigError
from rlvr.verifiers.code import CodeVerifier
from rlvr.verifiers.code.compare import Comparison, same_text, same_value, short

HOW = Comparison()


@pytest.mark.parametrize(
    ("found", "expected", "how", "same"),
    [
        ("3\n", "3", {}, True),
        (" 1  2\r\n3 ", "1 2\n3\n", {}, True),
        ("3.0", "3", {}, False),
        ("+3", "3", {}, False),
        ("03", "3", {}, False),
        ("0.50", "0.5", {}, True),
        ("5e-1", "0.5", {}, True),
        ("2", "2.0", {}, True),
        ("0.5000004", "0.5", {}, True),
        ("0.501", "0.5", {}, False),
        ("0.501", "0.5", {"tolerance": 0.01}, True),
        ("4", "3", {"tolerance": 10}, False),
        ("1000000.04", "1000000.0", {}, True),
        ("1000000.5", "1000000.0", {}, False),
        ("1000000", "1000000.5", {}, False),
        ("500000", "500000.5", {}, False),
        ("1234567", "1234567.49", {}, False),
        ("12345678.0", "12345678.1", {}, False),
        ("98765432109.0", "98765432109.5", {}, False),
        ("0", "2.5e-7", {}, False),
        ("0.0", "0.0000001", {"tolerance": 1.0}, False),
        ("2.5000001e-7", "2.5e-7", {}, True),
        ("2.51e-7", "2.5e-7", {}, False),
        ("1e-9", "0.0", {}, True),
        ("-0.000000", "0.0", {}, True),
        ("0.001", "0.0", {}, False),
        ("3.14159", "3.14159265", {}, True),
        ("3.1415", "3.14159265", {}, False),
        ("123456889", "123456789.0", {}, False),
        ("123456790", "123456789.0", {}, False),
        ("123456789", "123456789.0", {}, True),
        ("123456789.02", "123456789.0", {}, True),
        ("123456789.2", "123456789.0", {}, False),
        ("123456792.0", "123456789.0", {"tolerance": 1e-4}, True),
        ("1000000000000001024", "1e18", {}, True),
        ("1000000100000000000", "1e18", {}, False),
        ("0.5000004", "0.5", {"tolerance": 0}, False),
        ("1.1", "1.10", {}, True),
        ("1.1", "1.10", {"tolerance": 0}, True),
        ("3e4567", "9e9999", {}, False),
        ("9e9999", "9e9999", {}, True),
        ("1e-4567", "0.0", {}, False),
        ("0.0", "1e-4567", {}, False),
        ("0e1234", "0.0", {}, True),
        ("nan", "0.5", {}, False),
        ("inf", "1e300", {}, False),
        ("1e400", "0.5", {}, False),
        ("yes", "YES", {}, False),
        ("yes", "YES", {"ignore_case": True}, True),
        ("1 2 3", "1 2", {}, False),
        ("1", "1 2", {}, False),
        ("", "", {}, True),
        ("0 1 2 3 4 5", "3", {}, False),
        ("a b", "a  b", {"lines": True}, False),
        ("a  b  \n\n", "a  b", {"lines": True}, True),
        ("0.50", "0.5", {"lines": True}, False),
        ("１", "1", {}, False),  # noqa: RUF001 (a digit of another script)
    ],
)
def test_printed_text_is_compared_token_by_token(found, expected, how, same):
    assert (same_text(found, expected, Comparison(**how)) is None) is same


@pytest.mark.parametrize(
    ("found", "expected", "how", "same"),
    [
        (1, 1, {}, True),
        (True, 1, {}, False),
        (1, True, {}, False),
        (1.0, 1, {}, False),
        (1, 1.0, {}, True),
        (True, 1.0, {}, False),
        (True, 1, {"strict_numbers": False}, True),
        (1.0, 1, {"strict_numbers": False}, True),
        (0.1 + 0.2, 0.3, {}, True),
        (0.1 + 0.2, 0.3, {"tolerance": 0}, False),
        (float("nan"), float("nan"), {}, True),
        (float("inf"), 1e308, {}, False),
        (10**400, 1.5, {}, False),
        (10**30, 10**30 + 1, {}, False),
        ((1, 2), [1, 2], {}, True),
        ((1, 2), [1, 2], {"strict_sequences": True}, False),
        ([[1, (2,)]], [[1, [2]]], {}, True),
        ([1, 2, 3], [1, 2], {}, False),
        ({"a": (1,)}, {"a": [1]}, {}, True),
        ({1: 2}, {True: 2}, {}, False),
        ({"a": 1, "b": 2}, {"a": 1}, {}, False),
        ({1, 2}, {1, 2}, {}, True),
        ({1, 2}, {1, True + 1.0}, {}, False),
        ({1, 2}, [1, 2], {}, False),
        ("1", 1, {}, False),
        (None, None, {}, True),
        (None, 0, {}, False),
        (b"a", "a", {}, False),
    ],
)
def test_values_are_compared_by_type(found, expected, how, same):
    assert same_value(found, expected, Comparison(**how)) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (0.0, 3e-9, False),
        (3e-9, 3e-9 * (1 + 1e-9), True),
        (0, 1e-300, False),
        (1e-12, 0.0, True),
        (123456889.0, 123456789.0, False),
        (123456889, 123456789.0, False),
        (2000001 // 2, 1000000.5, False),
        (2000001 / 2, 1000000.5, True),
        (1000000, 1000000.0, True),
        (0.1 + 0.2, 0.3, True),
        ({(True, True), (2.0, False)}, {(1, 1), (2, 0)}, False),
        ({(1, 1), (2, 0)}, {(1, 1), (2, 0)}, True),
        ({(1, (True,))}, {(1, (1,))}, False),
        ({frozenset({1})}, {frozenset({True})}, False),
        ({(1, True): 0}, {(1, 1): 0}, False),
        ({(1, 1): 0}, {(1, 1): 0}, True),
        ({1, 2}, {1, 2.0}, False),
    ],
)
def test_values_within_sets_and_close_to_zero(found, expected, same):
    assert same_value(found, expected, HOW) is same
    loose = Comparison(strict_numbers=False)
    assert same_value(found, expected, loose) is (same or isinstance(found, (set, dict)))


def test_deep_and_large_values_are_compared_and_shown():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert not same_value(deep, deep, HOW)
    assert short(deep)
    assert short(10**100_000) == "an int of 332193 bits"
    assert "5000000 characters" in short("x" * 5_000_000)


@pytest.mark.parametrize("written", [{"tolerance": -1}, {"tolerance": True}, {"lines": 1}, {"tolerence": 1}])
def test_a_bad_comparison_is_refused(written):
    with pytest.raises(ConfigError, match=r"code: .*(tolerance|lines)"):
        CodeVerifier(comparison=written)
