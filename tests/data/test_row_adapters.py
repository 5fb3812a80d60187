"""Every layout gives the task it should; every bad row is named with its place, field and fix."""

import datetime

import pytest

from rlvr.data import to_task
from rlvr.errors import DataError

QUESTION = [{"role": "user", "content": "2+2?"}]


def test_our_own_layout_is_taken_as_it_is_and_extra_columns_go_to_info():
    row = {
        "id": 7,
        "prompt": "2+2=",
        "answer": "4",
        "demonstration": "It is 4.",
        "verifier": "math",
        "info": {"tests": [1]},
        "source": "mine",
        "level": 3,
    }
    task = to_task(row)
    assert (task.id, task.prompt, task.answer, task.demonstration) == ("7", "2+2=", "4", "It is 4.")
    assert (task.verifier, task.source, task.info) == ("math", "mine", {"level": 3, "tests": [1]})


def test_a_task_survives_its_own_json():
    task = to_task({"prompt": QUESTION, "answer": "4", "level": 3}, source="s")
    assert to_task(task.to_json()) == task


def test_gsm8k_answer_loses_its_commas_and_the_worked_text_is_the_demonstration():
    worked = "She has 1,000 + 80.\n#### 1,080"
    task = to_task({"question": "How many?", "answer": worked})
    assert task.prompt == [{"role": "user", "content": "How many?"}]
    assert (task.answer, task.demonstration, dict(task.info)) == ("1080", worked, {})


def test_gsm8k_answer_that_is_no_number_keeps_its_commas():
    assert to_task({"question": "Where?", "answer": "#### (1,2)"}).answer == "(1,2)"


def test_verl_layout():
    row = {
        "data_source": "openai/gsm8k",
        "prompt": QUESTION,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    task = to_task(row)
    assert (task.prompt, task.answer, task.source) == (QUESTION, "4", "openai/gsm8k")
    assert task.info == {"ability": "math", "split": "train", "index": 0}
    assert task.id.startswith("openai/gsm8k-")


@pytest.mark.parametrize("column", ["answer", "ground_truth", "solution"])
def test_trl_layout(column):
    completion = [{"role": "assistant", "content": "It is 4."}]
    task = to_task({"prompt": QUESTION, "completion": completion, column: "4", "level": 1})
    assert (task.answer, task.demonstration, task.info) == ("4", "It is 4.", {"level": 1})


def test_of_several_references_the_answer_wins_and_the_others_stay_in_info():
    task = to_task({"prompt": "2+2", "solution": "count", "answer": "4"})
    assert (task.answer, task.info) == ("4", {"solution": "count"})


def test_conversation_ends_in_the_demonstration():
    task = to_task({"messages": [*QUESTION, {"role": "assistant", "content": "4", "tool_calls": None}]})
    assert (task.prompt, task.demonstration) == (QUESTION, "4")


def test_null_columns_are_absent_as_parquet_writes_them():
    row = {"id": None, "prompt": None, "completion": None, "messages": QUESTION, "info": None, "answer": None}
    task = to_task(row)
    assert (task.prompt, task.answer, task.demonstration) == (QUESTION, None, None)


def test_field_map_overrides_what_would_be_recognised():
    row = {"question": "2+2?", "answer": "so\n#### 4", "final": 4, "level": 1, "note": "x"}
    task = to_task(row, fields={"prompt": "question", "answer": "final", "demonstration": "answer"})
    assert (task.prompt, task.answer, task.demonstration) == ("2+2?", 4, "so\n#### 4")
    assert task.info == {"level": 1, "note": "x"}


def test_field_map_with_a_list_for_info_drops_the_rest():
    task = to_task({"prompt": "p", "a": 1, "b": 2, "c": 3}, fields={"info": ["a", "b"]})
    assert task.info == {"a": 1, "b": 2}


def test_a_column_named_like_a_mapped_field_is_kept_in_info():
    task = to_task({"prompt": "p", "answer": "long", "final": "4"}, fields={"answer": "final"})
    assert (task.answer, task.info) == ("4", {"answer": "long"})


def test_a_column_within_another_is_written_with_a_dot():
    row = {"meta": {"question": "2+2?", "more": {"level": 1}}, "a.b": "4", "a": {"b": "5"}}
    fields = {"prompt": "meta.question", "answer": "a.b", "info": ["meta.more.level"]}
    task = to_task(row, fields=fields)
    # A column that is called like a path goes first.
    assert (task.prompt, task.answer, task.info) == ("2+2?", "4", {"meta.more.level": 1})
    assert to_task(row, fields={"prompt": "meta.question"}).info == row
    with pytest.raises(DataError, match=r"no field 'meta\.qestion', which the field map gives for 'prompt'"):
        to_task(row, fields={"prompt": "meta.qestion"})


def test_ids_are_stable_and_depend_on_what_is_asked_and_how_it_is_checked():
    base = {"prompt": "p", "answer": "4"}
    assert to_task(base).id == to_task({**base, "level": 2}, place="elsewhere").id
    assert to_task(base).id == "task-0d181d0530346ea0"
    assert to_task(base).id != to_task({**base, "answer": "5"}).id
    assert to_task({"prompt": "p", "tests": [1]}).id != to_task({"prompt": "p", "tests": [2]}).id
    assert to_task(base, source="a").id != to_task(base, source="b").id


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        (
            {"promt": "x", "answer": "4"},
            None,
            ["no field 'prompt'", "promt, answer", "did you mean 'promt'", "fields:"],
        ),
        ({"zzz": 1}, None, ["no field 'prompt'", "the row has zzz"]),
        ({}, None, ["no field 'prompt'", "nothing"]),
        (["p"], None, ["an object", "a list"]),
        ({"prompt": 3}, None, ["'prompt'", "a number"]),
        ({"prompt": ""}, None, ["'prompt' is empty"]),
        ({"prompt": []}, None, ["'prompt'", "an empty list"]),
        ({"prompt": [*QUESTION, {"text": "x"}]}, None, ["'prompt[1]'", "role"]),
        ({"prompt": "p", "demonstration": 4}, None, ["'demonstration' must be text", "a number"]),
        ({"prompt": "p", "verifier": ["m"]}, None, ["'verifier' must be text"]),
        ({"prompt": "p", "info": "x"}, None, ["'info' must be an object", "text"]),
        ({"prompt": "p", "id": 1.5}, None, ["'id'", "1.5"]),
        ({"prompt": "p", "blob": b"x"}, None, ["'info.blob'", "bytes"]),
        ({"prompt": "p", "answer": datetime.date(2020, 1, 1)}, None, ["'answer'", "date"]),
        ({"prompt": "p", "completion": [*QUESTION, *QUESTION]}, None, ["'completion'", "one assistant message"]),
        ({"question": "2+2?", "answer": "4"}, None, ["'answer'", "#### N", "{prompt: question, answer: answer}"]),
        ({"question": "q", "answer": "4"}, {"prompt": "qestion"}, ["'qestion'", "'prompt'", "did you mean 'question'"]),
        ({"question": "q"}, {"promt": "question"}, ["field map", "'promt'", "did you mean 'prompt'"]),
        ({"question": "q"}, {"prompt": ["question"]}, ["field map", "name of a column"]),
        ({"prompt": "p", "reward_model": {}, "extra_info": 1}, None, ["'extra_info' must be an object"]),
    ],
)
def test_bad_rows_are_named(row, fields, said):
    with pytest.raises(DataError) as caught:
        to_task(row, place="tasks.jsonl, line 3", fields=fields)
    message = str(caught.value)
    assert message.startswith("tasks.jsonl, line 3: ") or "field map" in message
    assert "\n" not in message
    for part in said:
        assert part in message


IMAGE = {"bytes": b"\x89PNG", "path": None}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "?", "image": "cat.png"},
        {"prompt": "?", "images": [None, IMAGE]},
        {"prompt": "?", "picture": IMAGE},
        {"question": "?", "answer": "#### 1", "image": IMAGE},
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    ],
)
def test_images_are_refused_by_row(row):
    with pytest.raises(DataError, match=r"^cats\.jsonl, line 3: images are not supported yet"):
        to_task(row, place="cats.jsonl, line 3")


@pytest.mark.parametrize(
    ("said", "row"),
    [
        ("images are", {"prompt": "?", "image_path": "cat.png"}),
        ("images are", {"prompt": "?", "pixel_values": [[0.1, 0.2]]}),
        ("images are", {"prompt": "?", "picture": {"bytes": None, "path": "cat.png"}}),
        ("images are", {"prompt": "?", "picture": {"bytes": "iVBORw0", "path": None}}),
        ("images are", {"prompt": "<image>Find x."}),
        ("images are", {"prompt": [{"role": "user", "content": "What is this?\n<image>\nSay it."}]}),
        ("images are", {"prompt": "What is this? <image>"}),
        ("videos are", {"prompt": "?", "videos": ["clip.mp4"]}),
        ("videos are", {"prompt": "?", "video": "https://a.b/c"}),
        ("videos are", {"prompt": [{"role": "user", "content": [{"type": "video", "video": "clip.mp4"}]}]}),
        ("audio is", {"prompt": "?", "audio": {"path": "a.wav", "array": [0.1], "sampling_rate": 16000}}),
        ("audio is", {"prompt": "?", "sound": {"path": "a.wav", "array": [0.1], "sampling_rate": 16000}}),
        ("audio is", {"prompt": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    ],
)
def test_other_media_are_refused_by_row(said, row):
    with pytest.raises(DataError, match=rf"^cats\.jsonl, line 3: {said} not supported yet, and "):
        to_task(row, place="cats.jsonl, line 3")


def test_text_about_media_is_text():
    prompts = ["Does <image> need an end tag in SVG?", "<video>\n  <source>\n</video>\nWhat is wrong?"]
    for prompt in prompts:
        row = {
            "prompt": prompt,
            "video": "A cat jumps.",
            "audio": 3,
            "pixel_values": [],
            "file": {"bytes": None, "path": None},
        }
        assert to_task(row).prompt == prompt


def test_parts_of_text_are_joined_and_others_are_named():
    parts = [{"type": "text", "text": "2+2", "image": None}, {"type": "text", "text": "= ?"}]
    for name in ("prompt", "messages"):
        assert to_task({name: [{"role": "user", "content": parts}]}).prompt == [{"role": "user", "content": "2+2\n= ?"}]
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    assert to_task({"messages": chat}).demonstration == "4"
    with pytest.raises(DataError, match=r"field 'prompt\[0\]' has a part that is no text: \"{'type': 'file'"):
        to_task({"prompt": [{"role": "user", "content": [{"type": "file", "file": "a.pdf"}]}]})


def test_columns_of_images_that_hold_none_are_no_images():
    text = [{"role": "user", "content": [{"type": "text", "text": "?", "image": None}]}]
    assert to_task({"prompt": text, "image": None, "images": [], "answer": "1"}).answer == "1"
    kept = to_task({"problem": "?", "image": "cat.png"}, fields={"prompt": "problem", "info": []})
    assert dict(kept.info) == {}  # a field map that leaves the column out says that it is not needed
