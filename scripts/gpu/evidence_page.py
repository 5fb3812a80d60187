"""The tables of docs/gpu.md, from the JSON lines that evidence.py wrote, and the sentence at its top: blocks between
two marks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages import STAGES

BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
TOP_BEGIN, TOP_END = "<!-- seen: begin -->", "<!-- seen: end -->"
NOTHING_SEEN = "**No part of this library has run on a GPU yet.**"
NOTHING = """**Not yet run on a GPU.** No stage of the kit has run on one. `evidence.py --write-docs` writes
tables from its JSON here. Each stage runs on a CPU in the tests, at toy size."""
SHORTEST, LONGEST = 1e-3, 1e6
"""Numbers outside of these are written with an exponent."""


def write_page(page: Path, evidence: Path) -> None:
    """Replace the blocks of `page` by those of `evidence`. ValueError where the page lacks one."""
    text = page.read_text(encoding="utf-8")
    lines = read_lines(evidence)
    for begin, end, block in ((TOP_BEGIN, TOP_END, seen(lines)), (BEGIN, END, block_of(lines))):
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(
                f"{page} needs one line {begin} and after it one line {end}: what was measured goes between them"
            )
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{block}\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def read_lines(evidence: Path) -> list[dict[str, Any]]:
    """The lines of a file of evidence. OSError where there is no such file, ValueError names a line that is not one of
    them."""
    found = []
    for number, text in enumerate(evidence.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            line["stage"], line["status"], line["results"] = (
                int(line["stage"]),
                line["status"],
                line.get("results", {}),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{evidence}, line {number} is no line of evidence: {error}") from error
        found.append(line)
    return found


def seen(lines: Sequence[dict[str, Any]]) -> str:
    """The sentence at the top of the page: the stages that have run on a GPU, and on which."""
    shown = _shown(lines)
    with_results = {number: [line for line in of_one if line["results"]] for number, of_one in shown.items()}
    numbers = [str(number) for number, of_one in with_results.items() if of_one]
    if not numbers:
        return NOTHING_SEEN
    devices = sorted({line["device"] for of_one in with_results.values() for line in of_one})
    stages = f"Stages {', '.join(numbers)}" if len(numbers) > 1 else f"Stage {numbers[0]}"
    return (
        f"**{stages} of the kit below measured the library on a GPU ({'; '.join(devices)}): the tables have the "
        "results.**"
    )


def block_of(lines: Sequence[dict[str, Any]]) -> str:
    """The block of tables: of each stage the newest line that comes from a GPU and, where that is no success, an older
    one."""
    shown = _shown(lines)
    if not shown:
        return NOTHING
    questions = {stage.number: stage for stage in STAGES}
    rows = [
        [str(number), questions[number].name, *_overview(line)] for number, of_one in shown.items() for line in of_one
    ]
    parts = [_table(["stage", "", "result", "seconds", "GPU", "torch", "begun"], rows)]
    for number, of_one in shown.items():
        parts.append(f"### {number}. {questions[number].question}")
        for line in of_one:
            if len(of_one) > 1:
                parts.append(f"Begun {line['begun']}, {line['status']}:")
            parts += _tables(line)
    return "\n\n".join(parts)


def _shown(lines: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The lines of each stage that the page shows, the newest first, in the order of the stages.

    Beside a newest one that is no success an older one: the newest success, or else the newest with results. So an
    attempt that fails hides nothing that was measured before.
    """
    found = {}
    for stage in STAGES:
        of_one = [
            line
            for line in reversed(lines)
            if line["stage"] == stage.number and line.get("asked_device") == "cuda" and line.get("device")
        ]
        if not of_one:
            continue
        newest, *older = of_one
        good = [line for line in older if line["status"] == "ok"] or [line for line in older if line["results"]]
        found[stage.number] = [newest, *([] if newest["status"] == "ok" else good[:1])]
    return found


def _overview(line: dict[str, Any]) -> list[str]:
    reason = f": {line['reason']}" if line.get("reason") else ""
    versions = line.get("versions", {})
    return [
        _cell(f"{line['status']}{reason}"),
        _cell(line["seconds"]),
        _cell(line["device"]),
        versions.get("torch", ""),
        line["begun"],
    ]


def _tables(line: dict[str, Any]) -> list[str]:
    """Results that have the same fields make one table; lists and mappings within them are in the JSON alone."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    single = []
    for name, value in line["results"].items():
        if isinstance(value, dict):
            fields = {key: one for key, one in value.items() if not isinstance(one, list | dict)}
            if fields:
                groups.setdefault(tuple(fields), []).append([_cell(name), *map(_cell, fields.values())])
        elif not isinstance(value, list):
            single.append([_cell(name), _cell(value)])
    found = [_table(["", *fields], rows) for fields, rows in groups.items()]
    if single:
        found.append(_table(["", "value"], single))
    if line.get("failures"):
        rows = [[_cell(one["name"]), _cell(one["error"])] for one in line["failures"]]
        found.append(_table(["failed", "error"], rows))
    if line.get("left_out"):
        found.append(_table(["left out", "reason"], [[_cell(k), _cell(v)] for k, v in line["left_out"].items()]))
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """A value as the cell of a table: on one line, and short."""
    if value is None:
        return "-"
    if isinstance(value, float):
        ordinary = value == 0 or SHORTEST <= abs(value) < LONGEST
        return f"{value:.4g}" if ordinary or value != value else f"{value:.3e}"
    text = " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 300 else text[:297] + "..."
