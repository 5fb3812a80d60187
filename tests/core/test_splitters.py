"""Splitters: the parts of a text by hand, and what holds of all of them; parts of a rollout as tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advantage_helpers import PROMPT, batch_of
from rlvr.core.splitters import BORDERS, Splitter, tokens_of
from rlvr.records import Origin, Segment

TEXT = "We add 2.\n\nThat is 3.5, e.g. more. Is it?\n \n Step 2: no.\nWait, yes."


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ("blank_line", ["We add 2.", "That is 3.5, e.g. more. Is it?", "Step 2: no.\nWait, yes."]),
        ("line", ["We add 2.", "That is 3.5, e.g. more. Is it?", "Step 2: no.", "Wait, yes."]),
        ("sentence", ["We add 2.", "That is 3.5, e.g. more.", "Is it?", "Step 2: no.", "Wait, yes."]),
        (("Step ", "Wait"), ["We add 2.\n\nThat is 3.5, e.g. more. Is it?", "Step 2: no.", "Wait, yes."]),
        (r"[.?]\s+", ["We add 2", "That is 3.5, e.g", "more", "Is it", "Step 2: no", "Wait, yes."]),
    ],
)
def test_parts_by_hand(split, parts):
    splitter = Splitter(split)
    assert splitter.texts(TEXT) == parts
    assert [TEXT[a:b] for a, b in splitter.of_text(TEXT)] == parts
    joined = Splitter(split, most=2).of_text(TEXT)
    assert len(joined) == 2
    assert TEXT[slice(*joined[1])].startswith(parts[1]) and TEXT[slice(*joined[1])].endswith(parts[-1])


@given(st.text("ab. \n", max_size=200), st.sampled_from([*BORDERS, "sentence", ("a", "b.")]), st.integers(1, 5))
def test_parts_are_in_order_and_all_of_the_text_but_space(text, split, most):
    spans = Splitter(split, most).of_text(text)
    if split != "sentence":  # which leaves out what has no letter
        assert "".join("".join(text[a:b].split()) for a, b in spans) == "".join(text.split())
    assert all(b <= c for (_, b), (c, _) in itertools.pairwise(spans))
    assert len(spans) <= most
    assert all(text[a:b] and text[a:b] == text[a:b].strip() for a, b in spans)


def test_what_cuts_nothing_is_refused():
    for split, words in (("(", "nor a pattern"), ((), "list the texts"), (("Step", ""), "none empty")):
        with pytest.raises(ValueError, match=words):
            Splitter(split)
    with pytest.raises(ValueError, match="there is only a text"):
        Splitter("turn").of_text("a")


def test_parts_of_a_rollout_are_tokens():
    """Five tokens of two characters after the prompt, a tool's token between the third and the fourth."""
    (rollout,) = batch_of([1.0], lengths=[6]).rollouts
    rollout.text = "ab cd\nefg"
    rollout.origin[PROMPT + 3] = Origin.TOOL
    ends = np.full(len(rollout), -1)
    ends[rollout.sampled] = [2, 4, 5, 8, 9]
    rollout.char_ends = ends
    rollout.segments = [Segment("turn", PROMPT, PROMPT + 3), Segment("turn", PROMPT + 4, PROMPT + 6)]
    assert Splitter("turn").of_rollout(rollout) == [(2, 5), (6, 8)]
    assert Splitter("line").of_rollout(rollout) == [(2, 5), (6, 8)]
    # " cd" begins in the middle of the token of " c", and "ab" ends with the first.
    assert Splitter(r" ").of_rollout(rollout) == [(2, 3), (3, 8)]
    assert tokens_of(rollout, [(0, 99), (8, 9), (20, 30)]) == [(2, 8), (7, 8), (7, 8)]
    rollout.char_ends = None
    assert tokens_of(rollout, [(0, 1)]) == [(2, 8)]
    (unsampled,) = batch_of([1.0], lengths=[0]).rollouts
    assert tokens_of(unsampled, [(0, 1)]) == [(1, 2)]
