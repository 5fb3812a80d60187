"""The forms of public process data, each written out by hand, and what is refused."""

from __future__ import annotations

import pytest

from rlvr.data.step_rows import step_rows
from rlvr.errors import DataError


def read(*rows):
    return list(step_rows(((f"f[{number}]", row) for number, row in enumerate(rows)), "set"))


def test_the_form_of_processbench_labels_the_first_wrong_step():
    wrong, right = read(
        {
            "id": "gsm8k-0",
            "generator": "g",
            "problem": "2+2?",
            "steps": ["a", "bc", "d"],
            "final_answer_correct": False,
            "label": 1,
        },
        {"problem": "2+2?", "steps": ["a", "b"], "final_answer_correct": True, "label": -1},
    )
    assert (wrong.wrong, wrong.first_wrong, wrong.final_answer_correct) == ((False, True, None), 1, False)
    assert (right.wrong, right.first_wrong, right.final_answer_correct) == ((False, False), -1, True)
    assert (wrong.task.id, wrong.task.prompt, wrong.task.source) == ("gsm8k-0", "2+2?", "set")
    (text,) = wrong.responses
    assert text == "a\n\nbc\n\nd" and [text[a:b] for a, b in wrong.places] == ["a", "bc", "d"]


def test_the_forms_with_a_label_for_every_step():
    trl, prm800k = read(
        {"prompt": "2+2?", "completions": ["a", "b", "c"], "labels": [True, False, True]},
        {"prompt": "2+2?", "steps": ["a", "b", "c"], "ratings": [1, 0, -1]},
    )
    assert (trl.wrong, trl.first_wrong, trl.final_answer_correct) == ((False, True, False), 1, None)
    assert (prm800k.wrong, prm800k.first_wrong) == ((False, False, True), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": "a"}, r"f\[0\]: field 'steps' \(or 'completions'\) must be a list of texts"),
        ({"label": 2}, r"the first wrong of the 2 steps, from 0, or -1 where none is, not 2"),
        ({"label": None}, r"not None; or give 'labels'"),
        ({"label": True}, r"not True"),
        ({"labels": [True]}, r"field 'labels' must have a label for each of the 2 steps"),
        ({"labels": [True, -1]}, r"a label in 'labels' is true or false"),
        ({"final_answer_correct": "yes"}, r"'final_answer_correct' must be true or false, not 'yes'"),
        ({"problem": None}, r"there is no field 'prompt'"),
    ],
)
def test_one_line_for_a_row_that_is_none(changes, message):
    row = {"problem": "2+2?", "steps": ["a", "b"], "label": 1, "final_answer_correct": True}
    with pytest.raises(DataError, match=message) as error:
        read({**row, **changes})
    assert "\n" not in str(error.value)
