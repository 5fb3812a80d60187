"""Rows from files: JSON lines, a JSON array, parquet, or a folder with a file (or shards) per split.

Invariant: every row comes with its place, `FILE, line N` (from 1) or `FILE[N]` (from 0), so that an error can name it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")

SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
"""File names that say a split and nothing else."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""As Windows' editors write it at the begin of a file."""

Placed = tuple[str, Any]
"""(place, row)"""


def read_rows(path: Path) -> Iterator[Placed]:
    """The rows of one file, in order, read as they are asked for. DataError names the file and the line."""
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".json" and _starts_with_bracket(path):
        return _json_array(path)
    if path.suffix in (".json", ".jsonl"):
        places = ((f"{path}, line {number}", line) for number, line in numbered_lines(path))
        return ((place, _parse(line, place)) for place, line in places)
    raise DataError(f"{path}: tasks are read from {', '.join(SUFFIXES)} files, not {path.suffix or 'this kind'!r}")


def split_files(folder: Path, split: str) -> list[Path]:
    """The files of `split` in `folder`: `SPLIT.jsonl`, or shards `SPLIT-00000-of-00002.parquet`.

    Else the only file there is, unless it is named after another split. DataError says which files there are.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise DataError(f"the folder {folder} holds no {', '.join(SUFFIXES)} file")
    chosen = [file for file in files if file.stem == split or file.stem.startswith(f"{split}-")]
    if not chosen and (len(files) > 1 or files[0].stem in SPLITS):
        there = ", ".join(file.name for file in files)
        raise DataError(
            f"the folder {folder} has no file for the split {split!r} (it has {there}); name one: {folder}:SPLIT"
        )
    return chosen or files


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        # A byte-order mark and white space may stand before the bracket.
        return file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"["


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1; blank lines are left out, and so is a byte-order mark."""
    # As bytes: each line is decoded by itself, so that a line that is not UTF-8 is named.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            # Blank lines, such as one at the end, are no rows, but count as lines.
            if line.strip():
                yield number, line


def _json_array(path: Path) -> Iterator[Placed]:
    rows = _parse(path.read_bytes().removeprefix(_BYTE_ORDER_MARK), str(path), whole=True)
    for number, row in enumerate(rows):
        yield f"{path}[{number}]", row


def _parse(raw: bytes, place: str, whole: bool = False) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text at byte {error.start}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        if whole:
            where = f"line {error.lineno}, column {error.colno}"
        else:
            where = f"column {error.colno}"
        raise DataError(f"{place}, {where}: not valid JSON: {error.msg}") from error
    # Python's parser recurses; some thousand brackets are enough.
    except RecursionError as error:
        raise DataError(f"{place}: JSON nested too deeply to read") from error


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        # By batches: the whole file as Python objects takes many times its size.
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}[{number}]", row
                number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error
