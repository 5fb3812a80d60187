"""The public names of the library, for tests of its pages."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import rlvr


@cache
def public_names() -> dict[str, str]:
    """Each public name with the module that has it, as the stub of the package says."""
    stub = Path(rlvr.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"rlvr.{node.module}" for node in imports for alias in node.names}
