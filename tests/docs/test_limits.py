"""The limits of CONTRIBUTING.md for the source: lengths of files, and names that stand for one thing."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

LONGEST_FILE = 500
LONGEST_TRAINER = 320
TOP_LEVEL_FILES = 8


@pytest.fixture(scope="module")
def sources(root):
    """Path below src/rlvr -> text."""
    folder = root / "src/rlvr"
    return {path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def test_no_file_is_too_long(sources):
    lengths = {str(path): len(text.splitlines()) for path, text in sources.items()}
    assert not {path: length for path, length in lengths.items() if length > LONGEST_FILE}
    assert lengths["trainer.py"] <= LONGEST_TRAINER


def test_no_two_files_share_a_name_and_few_lie_at_the_top(sources):
    names = Counter(path.name for path in sources if path.name not in ("__init__.py", "__main__.py"))
    assert not {name: count for name, count in names.items() if count > 1}
    assert sum(len(path.parts) == 1 for path in sources) <= TOP_LEVEL_FILES


def test_no_two_public_classes_share_a_name(sources):
    names = Counter(
        node.name
        for text in sources.values()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name: count for name, count in names.items() if count > 1}
