"""Data sets in every form give the same tasks; what cannot be read is refused by name, place and fix."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlvr import registry
from rlvr.config.config_loading import load_config
from rlvr.data import load_tasks
from rlvr.data.sources import limited
from rlvr.errors import ConfigError, DataError
from rlvr.records import Task
from rlvr.registry import register

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "id": f"t{i}"} for i in range(4)]
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def ids(tasks):
    return [task.id for task in tasks]


def refused(spec, *said, **options):
    with pytest.raises(DataError) as caught:
        load_tasks(spec, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in said:
        assert part in message


@register("source", "test-counting")
def counting(*, count: int = 3):
    return (Task(f"n{i}", f"count {i}") for i in range(count))


@pytest.fixture
def every_form(tmp_path):
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "train.jsonl", ROWS)
    write_lines(folder / "test.jsonl", ROWS[:1])
    return {
        "jsonl": write_lines(tmp_path / "rows.jsonl", ROWS),
        "lines in .json": write_lines(tmp_path / "rows.json", ROWS),
        "array": str(tmp_path / "array.json"),
        "parquet": write_parquet(tmp_path / "rows.parquet", ROWS),
        "folder": str(folder),
        "folder and split": f"{folder}:train",
        "mapping": {"path": str(folder), "split": "train"},
        "rows": ROWS,
        "tasks": [Task(row["id"], row["prompt"], row["answer"]) for row in ROWS],
        "datasets.Dataset": datasets.Dataset.from_list(ROWS),
        "datasets.DatasetDict": datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
        "several": [write_lines(tmp_path / "a.jsonl", ROWS[:2]), {"path": write_lines(tmp_path / "b.jsonl", ROWS[2:])}],
    }


def test_every_form_gives_the_same_tasks(every_form):
    for form, spec in every_form.items():
        tasks = load_tasks(spec)
        assert [(t.id, t.prompt, t.answer) for t in tasks] == [(r["id"], r["prompt"], r["answer"]) for r in ROWS], form
        assert ids(load_tasks(spec, limit=2)) == ["t0", "t1"], form


def test_an_option_laid_over_a_path_by_an_override_is_an_option_of_that_path(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    config = load_config({"data": {"train": path}}, ["data.train.limit=2"])
    assert ids(load_tasks(config.data.train)) == ["t0", "t1"]


def test_paths_are_relative_to_the_working_directory(tmp_path, monkeypatch):
    write_lines(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert len(load_tasks("rows.jsonl")) == 4


def test_the_source_is_the_file_or_the_folder_of_a_split(every_form, tmp_path):
    assert {t.source for t in load_tasks(every_form["jsonl"])} == {"rows"}
    assert {t.source for t in load_tasks(every_form["folder"])} == {"folder"}
    assert {t.source for t in load_tasks(str(tmp_path / "folder" / "test.jsonl"))} == {"folder"}
    assert [t.source for t in load_tasks(every_form["several"])] == ["a", "a", "b", "b"]
    assert load_tasks({"path": every_form["jsonl"], "source": "mine"})[0].source == "mine"


def test_shards_of_a_split_are_joined_in_order(tmp_path):
    write_parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[2:])
    write_parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", ROWS[:1])
    assert ids(load_tasks(str(tmp_path))) == ["t0", "t1", "t2", "t3"]
    assert ids(load_tasks(str(tmp_path), split="test")) == ["t0"]


def test_strings_in_a_list_are_prompts_unless_they_read_as_paths():
    prompts = ["What is 2+2?", "你好", "Say hi.", "k=0:", "2+2=", "[[1,2]", "x/y=1"]
    assert [t.prompt for t in load_tasks(prompts)] == prompts
    refused(["dta/train.jsonl"], "dta/train.jsonl", "no such file")
    refused(["arithmetc"], "'arithmetc'", "no such file", "each is a mapping: {'prompt': 'arithmetc'}")


def test_a_list_of_many_prompts_reads_the_installed_packages_once(monkeypatch):
    """Their metadata takes tens of milliseconds, so that a read per prompt would take minutes for ten thousand."""
    reads = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: reads.append(group) or ())
    registry._entry_points.cache_clear()
    try:
        assert len(load_tasks([f"How much is {number} + 1?" for number in range(100)])) == 100
    finally:
        registry._entry_points.cache_clear()
    assert reads == ["rlvr.sources"]


def test_registered_sources_by_name_with_options_and_in_lists():
    assert ids(load_tasks("test-counting")) == ["n0", "n1", "n2"]
    assert ids(load_tasks({"name": "test-counting", "count": 1})) == ["n0"]
    mixed = load_tasks(["test-counting", {"prompt": "one more", "name": "a column"}])
    assert [t.source for t in mixed] == ["test-counting"] * 3 + [None]
    assert mixed[3].info == {"name": "a column"}
    with pytest.raises(ConfigError, match="no option 'cuont'; did you mean 'count'"):
        load_tasks({"name": "test-counting", "cuont": 1})
    refused({"name": "test-counting", "count": 0}, "'test-counting' is empty")


def test_a_function_in_a_file_is_a_source(tmp_path):
    (tmp_path / "mine.py").write_text("def rows(*, n: int = 2):\n    return [{'prompt': f'q{i}'} for i in range(n)]\n")
    tasks = load_tasks({"name": f"{tmp_path}/mine.py:rows", "n": 3})
    assert [t.prompt for t in tasks] == ["q0", "q1", "q2"]
    assert len(load_tasks(f"{tmp_path}/mine.py:rows")) == 2


def test_fields_per_data_set_and_for_all(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"problem": "p", "final": 1}])
    fields = {"prompt": "problem", "answer": "final"}
    for tasks in (load_tasks(path, fields=fields), load_tasks([{"path": path, "fields": fields}])):
        assert (tasks[0].prompt, tasks[0].answer) == ("p", 1)


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name/main:train[:10]", ("org/name", "main", "train[:10]")),
        ({"path": "org/name", "config": "main", "split": "dev"}, ("org/name", "main", "dev")),
    ],
)
def test_hub_names(monkeypatch, spec, asked):
    seen = []

    def load_dataset(name, config, *, split, revision):
        seen.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_tasks(spec)[0].source == "org/name"
    assert seen == [asked]


def test_a_hub_data_set_that_cannot_be_loaded_is_named(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused("org/name:test", "'org/name'", "split test", "ConnectionError: no network", os.getcwd())


def test_missing_files_name_the_path_and_the_working_directory():
    refused("nowhere/rows.jsonl", "'nowhere/rows.jsonl'", os.getcwd())
    refused("/nowhere/at/all", "'/nowhere/at/all'")
    refused("test-countin", "did you mean 'test-counting'")


def test_the_only_file_of_a_folder_is_used_unless_it_is_another_split(tmp_path):
    write_lines(tmp_path / "problems.jsonl", ROWS)
    assert len(load_tasks(str(tmp_path))) == 4
    (tmp_path / "problems.jsonl").rename(tmp_path / "test.jsonl")
    refused(str(tmp_path), "'train'", "test.jsonl")


def test_a_split_that_a_folder_lacks_is_named_with_those_it_has(every_form):
    refused(every_form["folder"] + ":dev", "'dev'", "train.jsonl", "test.jsonl")
    refused(every_form["datasets.DatasetDict"], "'tran'", "did you mean 'train'", split="tran")


def test_malformed_lines_name_file_line_and_column(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b",,}\n')
    refused(str(path), f"{path}, line 3, column 16", "not valid JSON")
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    refused(str(path), f"{path}, line 2", "not UTF-8")
    path.write_text('{"prompt": "a"}\n[1]\n')
    refused(str(path), f"{path}, line 2", "a list")
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    refused(str(path), f"{path}, line 2", "'prompt'", "did you mean 'promt'")
    array = tmp_path / "rows.json"
    array.write_text('[{"prompt": "a"},\n {"prompt" "b"}]')
    refused(str(array), f"{array}, line 2, column 12")
    array.write_text('[{"prompt": "a"}, {"prompt": 1}]')
    refused(str(array), f"{array}[1]", "'prompt'")


def test_a_byte_order_mark_is_no_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}', encoding="utf-8-sig")
    (tmp_path / "rows.json").write_text('[{"prompt": "a"}]', encoding="utf-8-sig")
    assert [load_tasks(str(tmp_path / name))[0].prompt for name in ("rows.jsonl", "rows.json")] == ["a", "a"]


def test_a_file_that_is_not_parquet_or_of_no_known_kind_is_named(tmp_path):
    broken, text = tmp_path / "rows.parquet", tmp_path / "rows.txt"
    broken.write_text("no parquet")
    text.write_text("hello")
    refused(str(broken), str(broken), "parquet")
    refused(str(text), str(text), ".jsonl", "'.txt'")


def test_empty_data_sets_are_named(tmp_path):
    refused(write_lines(tmp_path / "none.jsonl", []), "none.jsonl", "empty")
    (tmp_path / "none.json").write_text("[]")
    refused(str(tmp_path / "none.json"), "none.json", "empty")
    (tmp_path / "folder").mkdir()
    refused(str(tmp_path / "folder"), "folder", "holds no")
    refused([], "empty")
    refused(datasets.Dataset.from_list([]), "empty")
    refused(["test-counting", str(tmp_path / "none.jsonl")], "none.jsonl", "empty")


def test_an_id_given_twice_is_refused_with_both_places(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [*ROWS, ROWS[1]])
    refused(path, "'t1'", f"{path}, line 2", f"{path}, line 5")
    refused([ROWS[0], {**ROWS[0], "prompt": "other"}], "'t0'", "tasks[0]", "tasks[1]")


def test_equal_rows_without_an_id_are_kept_once_and_counted(caplog):
    rows = [{"prompt": "p", "answer": 1}, {"prompt": "p", "answer": 2}, {"prompt": "p", "answer": 1}]
    with caplog.at_level(logging.WARNING, logger="rlvr.data.sources"):
        assert [t.answer for t in load_tasks(rows)] == [1, 2]
    assert "1 rows" in caplog.text


def test_demonstrations_of_one_prompt_are_all_kept(caplog):
    """Solutions by several teachers, or right and wrong ones with a label; only the same text again is dropped."""
    rows = [
        {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": text}]}
        for text in ("a", "b", "a", "c")
    ]
    labelled = [
        {"prompt": "q", "demonstration": text, "label": label} for text, label in (("a", 1), ("b", 1), ("c", 0))
    ]
    with caplog.at_level(logging.WARNING, logger="rlvr.data.sources"):
        assert [task.demonstration for task in load_tasks(rows)] == ["a", "b", "c"]
        assert [task.demonstration for task in load_tasks(labelled)] == ["a", "b", "c"]
    assert [record.getMessage().partition(" rows")[0] for record in caplog.records] == ["1"]


def test_tasks_that_ask_the_same_with_another_answer_are_counted(caplog):
    rows = [
        {"prompt": "p", "answer": "1"},
        {"prompt": "q", "answer": "2"},
        {"prompt": "p", "answer": "3"},
        {"prompt": [{"role": "user", "content": "p"}], "answer": "4"},
        {"prompt": "p", "answer": "5", "unit": "a template may name it"},
        {"prompt": "p"},
    ]
    with caplog.at_level(logging.WARNING, logger="rlvr.data.sources"):
        assert len(load_tasks(rows)) == len(rows)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("1 tasks have the prompt of an earlier task") and "tasks[0] and tasks[2]" in said
    caplog.clear()
    load_tasks([rows[1], rows[2], rows[4]])
    assert not caplog.records


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_below_one_is_refused(limit):
    refused(ROWS, "limit", repr(limit), limit=limit)
    refused({"path": "x.jsonl", "limit": limit}, "x.jsonl")


@pytest.mark.parametrize(("count", "limit", "seed"), [(300, 100, 42), (300, 299, 42), (50, 1, 0)])
def test_a_limit_with_a_seed_draws_what_a_split_of_the_hub_library_draws(count, limit, seed):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "id": f"t{i}"} for i in range(count)]
    split = datasets.Dataset.from_list(rows).train_test_split(train_size=limit, shuffle=True, seed=seed)
    drawn = limited(load_tasks(rows), limit, seed)
    assert set(ids(drawn)) == set(split["train"]["id"])
    # In the order of the set.
    assert ids(drawn) == [row["id"] for row in rows if row["id"] in ids(drawn)]


@pytest.mark.parametrize("limit", [None, 4, 9])
def test_a_limit_that_takes_all_leaves_the_order(limit):
    assert ids(limited(load_tasks(ROWS), limit, 42)) == ["t0", "t1", "t2", "t3"]


def test_a_limit_without_a_seed_takes_the_first_tasks():
    assert ids(limited(load_tasks(ROWS), 2, None)) == ["t0", "t1"]


def test_the_room_imports_neither_torch_nor_the_hub_libraries():
    code = "import sys, rlvr.data; print([m for m in ('torch', 'datasets', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_is_no_data_set_is_refused():
    refused(3, "int")
    refused({"pth": "x"}, "'pth'", "did you mean 'path'")
    refused({"split": "train"}, "needs a `path`")


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k(split, count):
    if not GSM8K.is_dir():
        pytest.skip(f"no GSM8K files at {GSM8K}")
    tasks = load_tasks(f"{GSM8K}:{split}")
    assert len(tasks) == count
    assert all(float(task.answer) == int(task.answer) for task in tasks)
    assert all(int(t.demonstration.split("#### ")[1].replace(",", "")) == int(t.answer) for t in tasks)
    assert all(task.id.startswith("gsm8k-") and task.source == "gsm8k" for task in tasks)
