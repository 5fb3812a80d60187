"""The forms of public preference data, each written out by hand, and what is refused."""

from __future__ import annotations

import pytest

from rlvr.data.preference_rows import preference_rows, unique_ids
from rlvr.errors import DataError
from rlvr.records import Task


def read(*rows, source="set"):
    return list(preference_rows(((f"f[{number}]", row) for number, row in enumerate(rows)), source))


def chat(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def test_the_form_of_reward_bench():
    (row,) = read(
        {"prompt": "Hi?", "chosen": "good", "rejected": "bad", "subset": "hep-go", "id": 7, "chosen_model": "m"}
    )
    assert (row.task.prompt, row.chosen, row.rejected) == ("Hi?", ("good",), ("bad",))
    assert (row.task.id, row.task.source, row.task.info) == ("7", "hep-go", {"chosen_model": "m"})


def test_the_form_of_reward_bench_2_and_rm_bench_has_lists():
    one, three = read(
        {"prompt": "Hi?", "chosen": ["g"], "rejected": ["b1", "b2", "b3"], "subset": "Math", "num_correct": 1},
        {"prompt": "Hi?", "chosen": ["g1", "g2"], "rejected": ["b1", "b2"], "domain": "chat", "answer": "42"},
    )
    assert (one.chosen, one.rejected, one.responses) == (("g",), ("b1", "b2", "b3"), ("g", "b1", "b2", "b3"))
    assert (three.task.source, three.task.answer) == ("chat", "42")


def test_messages_with_and_without_a_prompt():
    """UltraFeedback gives whole conversations; their last message is the response."""
    with_prompt, without = read(
        {"prompt": "Hi?", "chosen": chat("Hi?", "good"), "rejected": chat("Hi?", "bad")},
        {"chosen": chat("Hi?", "so", "And?", "good"), "rejected": chat("Hi?", "so", "And?", "bad")},
    )
    assert (with_prompt.task.prompt, with_prompt.chosen, with_prompt.rejected) == ("Hi?", ("good",), ("bad",))
    assert (without.task.prompt, without.chosen) == (chat("Hi?", "so", "And?"), ("good",))


@pytest.mark.parametrize(
    ("columns", "label", "value", "first_wins"),
    [
        ("AB", "label", "A>B", True),
        ("AB", "label", "B>A", False),
        ("ab", "winner", "model_b", False),
        ("12", "winner", "model_a", True),
        ("12", "preference", 2, False),
    ],
)
def test_two_responses_and_a_winner(columns, label, value, first_wins):
    names = [f"response_{one}" for one in columns]
    (row,) = read({"question": "Hi?", names[0]: "x", names[1]: "y", label: value, "pair_id": "p", "source": "mmlu"})
    assert (row.chosen, row.rejected) == ((("x",), ("y",)) if first_wins else (("y",), ("x",)))
    assert (row.task.prompt, row.task.id, row.task.source) == ("Hi?", "p", "mmlu")


def test_a_tie_is_left_out_and_a_row_without_a_source_has_that_of_its_set():
    rows = read(
        {"prompt": "Hi?", "response_a": "x", "response_b": "y", "winner": "tie (bothbad)"},
        {"prompt": "Hi?", "chosen": "x", "rejected": "y", "subset": None},
    )
    assert [(row.chosen, row.task.source) for row in rows] == [(("x",), "set")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", r"f\[0\]: a row is an object with a prompt and its responses, not str"),
        ({"prompt": "Hi?", "rejected": "b"}, r"f\[0\]: there is no field 'chosen': prompt, chosen and rejected"),
        ({"prompt": "Hi?", "chosen": "g", "rejected": []}, r"f\[0\]: field 'rejected' must be a text, a list"),
        ({"chosen": "g", "rejected": "b"}, r"no field 'prompt' \(the row has chosen, rejected\)"),
        ({"prompt": "Hi?", "response_a": "x", "response_b": "y"}, r"need a `winner`, such as A or B"),
        ({"prompt": "?", "response_a": "x", "response_b": "y", "winner": "me"}, r"not 'me'"),
        ({"prompt": "Hi?", "chosen": "g", "rejected": "b", "info": "x"}, r"field 'info' must be an object"),
    ],
)
def test_one_line_for_a_row_that_is_none(row, message):
    with pytest.raises(DataError, match=message) as error:
        read(row)
    assert "\n" not in str(error.value)


def test_ids_are_made_unique():
    tasks = [Task("", "a"), Task("x", "b"), Task("x", "c"), Task("", "d")]
    assert [task.id for task in unique_ids(tasks, "set")] == ["set/0", "x", "x#2", "set/3"]
