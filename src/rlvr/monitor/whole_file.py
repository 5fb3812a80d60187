"""A file that is whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from rlvr.errors import TrainingError


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, a disk that is full is said with the file `path`: a write that fails does not say of which file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write `text` aside and put it in the place of `path`, whose folder is made. OSError, which names the file, where
    the disk refuses: then nothing of it is left. What is no file (/dev/stdout, a pipe) is written to, and stays what it
    is."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut after the rename may leave a file of zero bytes under the name
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)  # half a file would keep a full disk full
        error.filename = error.filename or str(path)  # a write that fails does not say of which file
        raise


def folder_gone(folder: Path) -> TrainingError:
    """The error of a run whose folder was removed."""
    return TrainingError(
        f"the run folder {folder} is gone: it was removed or renamed while the run was writing to it. The run stops; "
        "what it did since the last checkpoint is lost"
    )
