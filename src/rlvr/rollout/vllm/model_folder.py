"""Folders of a started vLLM process: a scratch folder of its own, and one with the model's configuration and tokenizer.

There are no weights in either. Weights come by the first publish, so a policy that was built from nothing needs no
files, and one that was loaded is not read twice.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import os
import shutil
import tempfile
from pathlib import Path

from rlvr.core.cache_folder import cache_folder
from rlvr.core.process import parent_death
from rlvr.policy import Policy

log = logging.getLogger(__name__)
DIGEST_CHARACTERS = 16
"""Of a SHA-256 in a folder's name: 64 bits, and the content is compared as well."""


def scratch_folder() -> Path:
    """A fresh folder for what a started process needs; it goes when its owner closes, exits or dies."""
    # The prefix is what `parent_death` requires of folders that it removes when the trainer dies.
    folder = Path(tempfile.mkdtemp(prefix=parent_death.PREFIX))
    # For an owner that is never closed (a notebook); after a close the folder is gone and this does nothing.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model_folder(policy: Policy, scratch: Path) -> Path:
    """The folder with the policy's configuration and tokenizer, at a path that depends on their content alone.

    vLLM looks up what torch.compile made in earlier starts by a hash of its configuration, which has the model's path
    in it (`ModelConfig.compute_hash` of vLLM 0.32): a path that is new at each start never finds it. Where the user's
    cache folder cannot be written to, the folder is in `scratch`.
    """
    written = scratch / "model"
    policy.describe(written)
    try:
        return stable_copy(written, cache_folder() / "models")
    except OSError as error:
        log.warning(
            "the model's configuration cannot be kept between runs (%s), so vLLM compiles anew at each start: set "
            "RLVR_CACHE to a folder that can be written to",
            error,
        )
        return written


def stable_copy(source: Path, folder: Path) -> Path:
    """A folder in `folder` with the files of `source`, named after their content; made in one step unless it is there.

    Processes that start at once get the same one. Nothing that is there is changed or removed: where something else has
    the name, the next one (`NAME-2`) is taken. OSError where nothing can be written.
    """
    digest = content_digest(source)
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = folder / (digest if number == 1 else f"{digest}-{number}")
        # lexists: a dangling link has the name too, and writing through it would write elsewhere.
        if not os.path.lexists(path):
            _copy(source, path)
        if path.is_dir() and content_digest(path) == digest:
            return path
    raise AssertionError("count() does not end")


def content_digest(folder: Path) -> str:
    """A digest of the names and contents of all files below `folder`."""
    digest = hashlib.sha256()
    # Sorted: the order of a directory differs between file systems.
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        for part in (os.fsencode(file.relative_to(folder)), file.read_bytes()):
            # Lengths in front of names and contents, or ("ab", "c") and ("a", "bc") would have one digest.
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def _copy(source: Path, path: Path) -> None:
    """Copy `source` to `path` in one step; nothing where another process was first."""
    # In the same folder, so that the rename stays on one file system and is atomic.
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
    try:
        shutil.copytree(source, fresh, dirs_exist_ok=True)
        os.rename(fresh, path)
    except OSError:
        if not os.path.lexists(path):
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
