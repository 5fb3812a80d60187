"""data/par.jsonl: the prompts of UltraFeedback, each with a response of the model before training.

The authors sample ten (PorUna-byte/PAR, commit b8caf40, auto_sh/gemma2-2b_ultrafb_bin.sh, the line gen_refs), the
recipe has one.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlvr.config import Config
from rlvr.data import load_tasks
from rlvr.data.files import Placed
from rlvr.recipes.sampled_responses import responded

DATA = "HuggingFaceH4/ultrafeedback_binarized"


def rows(config: Config) -> Iterator[Placed]:
    """Yield the prompts in the order of the set."""
    return responded(config, load_tasks({"path": f"{DATA}:train_prefs", "fields": {"prompt": "prompt"}}))
