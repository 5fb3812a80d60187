"""What vLLM needs to know of a policy, as a folder: configuration and tokenizer, no weights.

Weights come by the first publish, so a policy that was built from nothing needs no files, and one that was loaded is not
read twice.
"""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from pathlib import Path

from rlvr import lifeline
from rlvr.policy import Policy


def scratch_folder() -> Path:
    """A fresh folder for what a started process needs; it goes when its owner closes, exits or dies."""
    folder = Path(tempfile.mkdtemp(prefix=lifeline.PREFIX))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def describe(policy: Policy, folder: Path) -> None:
    """Write the policy's configuration and tokenizer to `folder`."""
    model = policy.causal_lm
    config = copy.deepcopy(model.config)
    config.architectures = config.architectures or [type(model).__name__]  # a model that was never saved has none
    config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
