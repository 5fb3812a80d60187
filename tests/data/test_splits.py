"""Splits by the text's hash: disjoint, complete, of the right share, and independent of digits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.data import in_split
from rlvr.errors import DataError


@given(st.text(), st.floats(0, 1))
def test_every_text_is_in_exactly_one_split(key, share):
    assert in_split(key, "train", share) != in_split(key, "eval", share)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_the_share_is_right_over_all_and_for_every_last_digit(share):
    texts = [f"{a} + {b} =" for a in range(100) for b in range(100)]
    held_out = [text for text in texts if in_split(text, "eval", share)]
    assert abs(len(held_out) / len(texts) - share) < 0.02
    for digit in range(10):
        same = [text for text in texts if text.endswith(f"{digit} =")]
        assert abs(sum(in_split(text, "eval", share) for text in same) / len(same) - share) < 0.05


def test_shares_of_nothing_and_all_and_a_larger_share_holds_the_smaller():
    keys = [str(i) for i in range(300)]
    assert not any(in_split(key, "eval", 0) for key in keys)
    assert all(in_split(key, "eval", 1) for key in keys)
    assert {k for k in keys if in_split(k, "eval", 0.1)} < {k for k in keys if in_split(k, "eval", 0.3)}


def test_the_split_of_a_text_never_changes():
    assert [i for i in range(8) if in_split(f"{i}+1", "eval", 0.5)] == [1, 2, 3, 4]


def test_refusals():
    with pytest.raises(DataError, match="'evl'; did you mean 'eval'"):
        in_split("x", "evl", 0.1)
    with pytest.raises(DataError, match=r"eval_share=1.5"):
        in_split("x", "eval", 1.5)
