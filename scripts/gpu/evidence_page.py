"""The tables of docs/gpu.md, from the JSON lines that evidence.py wrote: a block of the page between two marks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages import STAGES

BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
NOTHING = """**Not yet run on a GPU.** No stage of the kit has been run on one; the tables that `evidence.py --write-docs` makes from its
JSON go here. Each stage runs on a CPU in the tests, at toy size."""
SHORTEST, LONGEST = 1e-3, 1e6
"""Numbers outside of these are written with an exponent."""


def write_page(page: Path, evidence: Path) -> None:
    """Replace the block of `page` by the tables of `evidence`. ValueError where the page has no block."""
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page} needs one line {BEGIN} and after it one line {END}: the tables go between them")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    block = block_of(read_lines(evidence))
    page.write_text(f"{before}{BEGIN}\n{block}\n{END}{after}", encoding="utf-8")


def read_lines(evidence: Path) -> list[dict[str, Any]]:
    """The lines of a file of evidence; none where there is no such file. ValueError names a line that is not one of them."""
    found = []
    if evidence.exists():
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


def block_of(lines: Sequence[dict[str, Any]]) -> str:
    """The block: for each stage the newest line that comes from a GPU."""
    newest = {line["stage"]: line for line in lines if line.get("asked_device") == "cuda" and line.get("device")}
    if not newest:
        return NOTHING
    rows = [
        [str(stage.number), stage.name, *_overview(newest[stage.number])] for stage in STAGES if stage.number in newest
    ]
    parts = [_table(["stage", "", "result", "seconds", "GPU", "torch", "begun"], rows)]
    for stage in STAGES:
        if stage.number in newest:
            parts += [f"### {stage.number}. {stage.question}", *_tables(newest[stage.number])]
    return "\n\n".join(parts)


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
