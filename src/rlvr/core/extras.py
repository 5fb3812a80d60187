"""The command that installs an extra of the package, in the environment that runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
"""The checkout, where the package is imported from one."""


def install_command(extra: str) -> str:
    """The command that installs an extra here: the checkout's script from its own environment, pip from any other."""
    # A checkout's script installs into the checkout's .venv, which need not be the environment that runs.
    if (CHECKOUT / "scripts" / "environment.sh").is_file() and Path(sys.prefix) == CHECKOUT / ".venv":
        # Absolute: a run may be started in any folder.
        return f"bash {shlex.quote(str(CHECKOUT / 'scripts' / 'environment.sh'))} {extra}"
    return f"pip install 'rlvr[{extra}]'"
