"""A folder for what a started vLLM process needs, the policy's configuration and tokenizer among it, and no weights.

Weights come by the first publish, so a policy that was built from nothing needs no files, and one that was loaded is not
read twice.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from rlvr import lifeline


def scratch_folder() -> Path:
    """A fresh folder for what a started process needs; it goes when its owner closes, exits or dies."""
    folder = Path(tempfile.mkdtemp(prefix=lifeline.PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
