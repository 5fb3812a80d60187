"""A row of a data set -> Task.

Layouts are recognised by their columns, so that a published data set needs no conversion:

- ours: `prompt, answer, demonstration, verifier, info, source, id`
- verl: `prompt`, `reward_model: {ground_truth, style}`, `data_source`, `extra_info`
- TRL: `prompt`, `completion` (a demonstration), the reference as `answer`, `ground_truth` or `solution`
- conversational: `messages`; what follows the last user turn is the demonstration
- GSM8K: `question`, `answer` that ends in `#### N`
- programming tasks: see rlvr.data.code

A field map `{our name: the row's column}` overrides what is recognised. A column within another is written with a dot,
`{prompt: meta.question}`.

Invariants: no column is lost (what has no place of its own goes to `info`, unless the map lists what `info` is), a null
column counts as absent, and a task's id does not depend on its place in the data set.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from rlvr.data.code import as_code_row
from rlvr.data.images import holds_media, refuse_images
from rlvr.errors import DataError, nearest
from rlvr.records import Messages, Task

FIELDS = ("id", "prompt", "answer", "demonstration", "verifier", "info", "source")
"""Our names: the fields of a Task, and what the keys of a field map may be."""

_ANSWERS = ("answer", "ground_truth", "solution")
# Matches `1,234`, `-3.5`, `$20`; not `5 apples`, whose comma, if any, is part of a text.
_NUMBER = re.compile(r"[-+]?\$?[\d,]+(\.\d+)?")

Row = dict[str, Any]


def to_task(
    row: Mapping[str, Any], *, place: str = "row", fields: Mapping[str, Any] | None = None, source: str | None = None
) -> Task:
    """The task that `row` describes.

    `place` says where the row is, for errors; `source` is used when the row names none. `fields` maps our names to
    columns; `info` may also be a list of columns. A row without an id gets `task_id`. DataError names the place, the
    field, what is wrong and the fix.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: a task is an object with a `prompt`, not {_kind(row)}")
    if fields:
        check_field_map(fields)
        columns = _mapped(dict(row), fields, place)
    else:
        columns = _recognised(dict(row), place)
    refuse_images(columns, columns["prompt"], place)
    extra = {name: value for name, value in columns.items() if name not in FIELDS}
    info = {**extra, **_object(columns, "info", place)}
    prompt = _prompt(columns["prompt"], place)
    answer = columns.get("answer")
    origin = _text(columns, "source", place) or source or None
    demonstration = _text(columns, "demonstration", place)
    check_json({"prompt": prompt, "answer": answer, **{f"info.{name}": value for name, value in info.items()}}, place)
    return Task(
        id=_id(columns, place) or task_id(prompt, answer, info, origin, demonstration),
        prompt=prompt,
        answer=answer,
        demonstration=demonstration,
        verifier=_text(columns, "verifier", place),
        info=info,
        source=origin,
        place=place,
    )


def check_field_map(fields: Any) -> None:
    """DataError where `fields` is no map from our names to names of columns. It needs no row."""
    if not isinstance(fields, Mapping):
        raise DataError(f"a field map is a mapping from our names to columns, {{prompt: COLUMN}}, not {fields!r}")
    for name, column in fields.items():
        if name not in FIELDS:
            raise DataError(f"the field map has no field {name!r}{nearest(str(name), FIELDS)}")
        several = name == "info" and isinstance(column, list)
        for one in column if several else [column]:
            if not isinstance(one, str):
                raise DataError(f"the field map gives {column!r} for {name!r}: it must be the name of a column")


def task_id(
    prompt: str | Messages, answer: Any, info: Mapping[str, Any], source: str | None, demonstration: str | None
) -> str:
    """The id of a task that was given none: the source and a hash of the prompt, of what checks an answer to it and of
    the demonstration, if it has one.

    What checks an answer is the reference or, where there is none, `info` (tests, rubrics). The values must be JSON
    types. Several demonstrations of one prompt are several tasks: supervised learning has them all.
    """
    content = [prompt, dict(info) if answer is None else answer]
    if demonstration is not None:
        content.append(demonstration)
    # 64 bits of it: two of a million tasks share an id by chance with a probability of 3e-8.
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{source or 'task'}-{digest[:16]}"


def check_json(values: Mapping[str, Any], place: str) -> None:
    """DataError for the first of `values` that cannot be written to a rollout file or a checkpoint."""
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{place}: field {name!r} cannot be written as JSON ({error}); convert it to text, numbers, lists or "
                "objects, or leave the column out with a field map"
            ) from error


def _recognised(row: Row, place: str) -> Row:
    """The row with our names in place of its layout's; other columns stay."""
    # First: programming tasks have columns of other layouts, too (`question`, `prompt`).
    row = as_code_row(row, place) or row
    if isinstance(row.get("reward_model"), Mapping):
        return _verl(row, place)
    if row.get("prompt") is not None:
        return _trl(row, place)
    if row.get("messages") is not None:
        return _conversation(row, place)
    if isinstance(row.get("question"), str) and isinstance(row.get("answer"), str):
        return _gsm8k(row, place)
    raise _missing("prompt", row, place)


def _verl(row: Row, place: str) -> Row:
    graded = dict(row.pop("reward_model"))
    extra = _object(row, "extra_info", place)
    row.pop("extra_info", None)
    if row.get("prompt") is None:
        raise _missing("prompt", row, place)
    answer = graded.pop("ground_truth", None)
    # "rule" or "model": who judges, which our `verifier` says.
    _ = graded.pop("style", None)
    ours = {"answer": answer, "source": row.pop("data_source", None)}
    return {**row, **ours, "info": {**graded, **extra, **_object(row, "info", place)}}


def _trl(row: Row, place: str) -> Row:
    if row.get("completion") is not None and row.get("demonstration") is None:
        row["demonstration"] = _reply(row.pop("completion"), "completion", place)
    # The first of them that is there; a row with `answer` and `solution` keeps the solution in info.
    reference = next((name for name in _ANSWERS if row.get(name) is not None), None)
    if reference is not None:
        row["answer"] = row.pop(reference)
    return row


def _conversation(row: Row, place: str) -> Row:
    messages = _messages(row.pop("messages"), "messages", place)
    row = _trl(row, place)
    # Else the last turn is the user's, and there is no demonstration.
    if messages[-1]["role"] == "assistant":
        reply = _reply(messages[-1:], "messages", place)
        messages = messages[:-1]
        if row.get("demonstration") is None:
            row["demonstration"] = reply
    return {**row, "prompt": messages}


def _gsm8k(row: Row, place: str) -> Row:
    worked = row.pop("answer")
    question = row.pop("question")
    _, mark, final = worked.rpartition("####")
    final = final.strip()
    if not mark or not final:
        raise DataError(
            f"{place}: field 'answer' must end in '#### N' beside a 'question' (the GSM8K layout), not "
            f"{worked[-40:]!r}; if the whole text is the reference answer, map the fields: {{prompt: question, "
            "answer: answer}"
        )
    return {
        **row,
        "prompt": [{"role": "user", "content": question}],
        # GSM8K writes thousands with a comma, `#### 1,200`; verifiers of text compare with what the model writes.
        "answer": final.replace(",", "") if _NUMBER.fullmatch(final) else final,
        "demonstration": worked if row.get("demonstration") is None else row["demonstration"],
    }


def _mapped(row: Row, fields: Mapping[str, Any], place: str) -> Row:
    """The row under an explicit map; what the map does not name is recognised as ever."""
    mapped: Row = {}
    used: set[str] = set()
    for name, column in fields.items():
        columns = column if isinstance(column, list) else [column]
        values = {one: _value_at(row, one, name, place) for one in columns}
        mapped[name] = values if isinstance(column, list) else values[column]
        used.update(columns)
    rest = {name: value for name, value in row.items() if name not in used}
    if "prompt" not in fields:
        rest = _recognised(rest, place)
    if "info" in fields:
        return {name: value for name, value in rest.items() if name in FIELDS} | mapped
    # A column that is called like a mapped field but is not the one mapped is kept, in info.
    namesakes = {name: rest[name] for name in mapped if name in row and name not in used}
    return {**rest, **mapped, "info": {**namesakes, **_object(rest, "info", place)}}


def _value_at(row: Row, column: str, name: str, place: str) -> Any:
    """The value of the column that the map gives for `name`; `meta.question` is a column within another."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            inner = value if isinstance(value, Mapping) and value is not row else row
            raise _missing(
                column, dict(inner), place, f", which the field map gives for {name!r}", nested=inner is not row
            )
        value = value[part]
    return value


def _prompt(value: Any, place: str) -> str | Messages:
    if isinstance(value, str):
        if not value:
            raise DataError(f"{place}: field 'prompt' is empty")
        return value
    return _messages(value, "prompt", place)


def _messages(value: Any, name: str, place: str) -> Messages:
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{place}: field {name!r} must be text or a list of chat messages, not {_kind(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f"{place}: field '{name}[{number}]' must be a chat message {{role: ..., content: ...}}, not "
                f"{str(message)[:80]!r}"
            )
    # Parquet fills keys that only some messages have with nulls; a chat template would see them as given.
    return [
        {
            k: _content(v, f"{name}[{number}]", place) if k == "content" else v
            for k, v in message.items()
            if k == "content" or v is not None
        }
        for number, message in enumerate(value)
    ]


def _content(value: Any, name: str, place: str) -> Any:
    """The content of a chat message: parts of text as one text, because templates of text models concatenate
    contents."""
    if not isinstance(value, (list, tuple)) or holds_media(value):  # media are refused when the row is whole
        return value
    for part in value:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise DataError(
                f"{place}: field {name!r} has a part that is no text: {str(part)[:80]!r}; the content of a message is "
                "text, or a list of {type: text, text: ...}"
            )
    return "\n".join(part["text"] for part in value)


def _reply(value: Any, name: str, place: str) -> str:
    """The text of a completion: a string, or one assistant message."""
    if isinstance(value, str):
        return value
    messages = _messages(value, name, place)
    if len(messages) != 1 or not isinstance(messages[0]["content"], str):
        raise DataError(f"{place}: field {name!r} must hold one assistant message of text as the demonstration")
    return messages[0]["content"]


def _id(columns: Row, place: str) -> str | None:
    value = columns.get("id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{place}: field 'id' must be text or a whole number, not {value!r}")
    return str(value)


def _text(columns: Row, name: str, place: str) -> str | None:
    value = columns.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{place}: field {name!r} must be text, not {_kind(value)}: {str(value)[:60]!r}")
    return value


def _object(columns: Row, name: str, place: str) -> Mapping[str, Any]:
    value = columns.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{place}: field {name!r} must be an object, not {_kind(value)}: {str(value)[:60]!r}")
    return value or {}


def _missing(name: str, row: Row, place: str, why: str = "", nested: bool = False) -> DataError:
    """The error about a field that the row, or the `nested` field of it, does not have."""
    hint = nearest(name.rpartition(".")[2] if nested else name, row)
    hint = hint if "did you mean" in hint else ""
    has = ", ".join(row) or "nothing"
    fix = ""
    if not why:
        fix = "; write it, or map it: fields: {" + name + ": COLUMN}"
    return DataError(
        f"{place}: there is no field {name!r}{why} ({'there' if nested else 'the row'} has {has}){hint}{fix}"
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", int: "a number", float: "a number"}
    if value == []:
        return "an empty list"
    return names.get(type(value), type(value).__name__)
