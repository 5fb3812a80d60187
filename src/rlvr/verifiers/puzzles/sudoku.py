"""Sudoku and Latin squares: a full grid that keeps the given cells and repeats no symbol in a row, column or box."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, unparsable, wrong

_BLANK = ("", "0", ".", "_", "*", "?", "None")
_CELL = re.compile(r"[0-9]+")
# Lines such as `------+-------` and those of box-drawing characters.
_RULER = re.compile(r"[-+|=\s\u2500-\u257f]*")
# Letters or other signs beside digits, separators and rules: then the text is more than a grid.
_BESIDE = re.compile(r"[^0-9\s|,;\[\]\u2500-\u257f]")


@register_verifier("sudoku")
@dataclass
class SudokuVerifier(AnswerVerifier):
    """The answer is a full grid that keeps the given cells of `info["puzzle"]`, each symbol once per row, column and
    box.

    The puzzle is a list of rows, or rows in one text; an empty cell is 0, `.`, `_` or null. Symbols are 1 to n. Boxes
    are `info["box"]` = [rows, columns]; by default the most square that divide n (2 x 3 for n = 6); `info["box"]` =
    null or [1, n] asks for a Latin square. The answer is n rows in digits, with or without separators and rules, or a
    JSON list.
    """

    def check_task(self, task: Task) -> str | None:
        puzzle = read_puzzle(task.info.get("puzzle"))
        if isinstance(puzzle, str):
            return puzzle
        size = len(puzzle)
        height, width = _box(task, size)
        if height * width != size:
            return f'info["box"]={task.info.get("box")!r} does not fit a grid of {size} rows'
        for unit in _units(size, height, width):
            clues = [puzzle[r][c] for r, c in unit if puzzle[r][c]]
            if len(set(clues)) < len(clues):
                return "a given symbol stands twice in a row, column or box of the puzzle"
        return None

    def judge(self, task: Task, answer: str) -> Verdict:
        puzzle = read_puzzle(task.info["puzzle"])
        assert not isinstance(puzzle, str)
        size = len(puzzle)
        grid = read_grid(answer, size)
        if isinstance(grid, str):
            return unparsable(grid, answer)
        cells = itertools.product(range(size), repeat=2)
        changed = next(((r, c) for r, c in cells if puzzle[r][c] not in (0, grid[r][c])), None)
        if changed:
            return wrong(f"row {changed[0] + 1}, column {changed[1] + 1} is not the given symbol", answer)
        wanted = set(range(1, size + 1))
        if any({grid[r][c] for r, c in unit} != wanted for unit in _units(size, *_box(task, size))):
            return wrong("a symbol stands twice in a row, column or box", answer)
        return Verdict.from_score(1.0, answer=answer)

    def same_answer(self, first: str, second: str) -> bool:
        return _CELL.findall(first) == _CELL.findall(second)


def _box(task: Task, size: int) -> tuple[int, int]:
    if "box" not in task.info:
        # The most square: 3 x 3 for 9, 2 x 3 for 6.
        height = max(h for h in range(1, math.isqrt(size) + 1) if size % h == 0)
        return height, size // height
    box = task.info["box"]
    if box is None:
        return 1, size
    fits = isinstance(box, (list, tuple)) and len(box) == 2 and all(type(side) is int and side > 0 for side in box)
    return (box[0], box[1]) if fits else (0, 0)


def _units(size: int, height: int, width: int) -> list[list[tuple[int, int]]]:
    """The cells of each row, column and box."""
    span = range(size)
    rows = [[(r, c) for c in span] for r in span]
    columns = [[(r, c) for r in span] for c in span]
    corners = itertools.product(range(0, size, height), range(0, size, width))
    boxes = [[(r + i, c + j) for i in range(height) for j in range(width)] for r, c in corners]
    return rows + columns + boxes


def read_puzzle(puzzle: Any) -> list[list[int]] | str:
    """The given cells, 0 where empty; else in words what is wrong."""
    if isinstance(puzzle, str):
        puzzle = [line.split() if " " in line.strip() else list(line.strip()) for line in puzzle.strip().splitlines()]
        # One line of 81 characters, as sudoku collections write a puzzle.
        if len(puzzle) == 1 and math.isqrt(len(puzzle[0])) ** 2 == len(puzzle[0]):
            size = math.isqrt(len(puzzle[0]))
            puzzle = [puzzle[0][i : i + size] for i in range(0, size * size, size)]
    if not isinstance(puzzle, Sequence) or not 2 <= len(puzzle) <= 36:
        return 'info["puzzle"] is no grid of 2 to 36 rows'
    rows = [[_given(cell) for cell in row] for row in puzzle if isinstance(row, Sequence)]
    if [len(row) for row in rows] != [len(puzzle)] * len(puzzle):
        return 'info["puzzle"] is not as wide as it is high'
    if not all(cell == "0" or _is_symbol(cell, len(rows)) for row in rows for cell in row):
        return f'info["puzzle"] has a symbol that is none of 1 to {len(rows)}'
    return [[int(cell) for cell in row] for row in rows]


def _given(cell: Any) -> str:
    if isinstance(cell, int):
        return str(cell) if 0 <= cell < 100 else "no symbol"
    text = str(cell).strip()
    return "0" if text in _BLANK else text


def read_grid(text: str, size: int) -> list[list[int]] | str:
    """The grid that an answer writes; else in words why it is none."""
    rows = _json_rows(text)
    if rows is None:
        text = text.strip().strip("`").strip()
        lines = [line for line in text.splitlines() if not _RULER.fullmatch(line)]
        if len(lines) == 1 and len(lines[0].strip()) == size * size:
            line = lines[0].strip()
            lines = [line[i : i + size] for i in range(0, size * size, size)]
        if any(_BESIDE.search(line) for line in lines):
            return "there is more than a grid"
        rows = [_CELL.findall(line) for line in lines]
        # One digit is one symbol, so that `123 456 789` and `1 2 3 ...` are the same row.
        if size < 10:
            rows = [list("".join(row)) for row in rows]
    if [len(row) for row in rows] != [size] * size:
        return f"not {size} rows of {size} symbols"
    if not all(_is_symbol(cell, size) for row in rows for cell in row):
        return f"a symbol that is none of 1 to {size}"
    return [[int(cell) for cell in row] for row in rows]


def _json_rows(text: str) -> list[list[str]] | None:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if fits:
        return [[str(cell) if type(cell) is int else "" for cell in row] for row in rows]
    return None


def _is_symbol(cell: str, size: int) -> bool:
    return len(cell) < 4 and cell.isascii() and cell.isdecimal() and 1 <= int(cell) <= size
