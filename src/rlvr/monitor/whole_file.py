"""Writing of files so that they are whole or absent."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rlvr.errors import TrainingError


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, an OSError for a full disk gets the name `path`: that of a failed write has none."""
    try:
        yield
    except OSError as error:
        # No space, quota used up, file size limit of the process: errors of write(2), which knows a descriptor only.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = error.filename or str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write `text` under another name and rename it to `path`, whose folder is made. OSError, which names the file,
    where the disk refuses: then nothing of it is left. A path that is no regular file (/dev/stdout, a pipe) is written
    to directly."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return
    with whole_file(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text to write to, which becomes the file `path` at the end; after an exception nothing of it is left. OSError,
    which names the file, where the disk refuses."""
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("w", encoding="utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut after the rename may leave a file of zero bytes under the name
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)  # half a file would keep a full disk full
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # a write that fails does not say of which file
        raise


def folder_gone(folder: Path) -> TrainingError:
    """The error of a run whose folder was removed."""
    return TrainingError(
        f"the run folder {folder} is gone: it was removed or renamed while the run was writing to it. The run stops; "
        "what it did since the last checkpoint is lost"
    )
