"""README.md is short, and its sizes are those of the code; its count of recipes is tested with the recipes."""

from __future__ import annotations

import re
from pathlib import Path


def lines_of(folder: Path) -> int:
    """The lines of the Python files below a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_the_readme_has_fewer_than_120_lines(root):
    assert len((root / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_readme_counts_the_lines_of_the_package(root):
    said = re.search(
        r"\| size of the package \| about ([\d,]+) lines, ([\d,]+) of them verifiers; the trainer has (\d+) \|",
        (root / "README.md").read_text(encoding="utf-8"),
    )
    package, verifiers, trainer = (int(number.replace(",", "")) for number in said.groups())
    source = root / "src/rlvr"
    assert trainer == len((source / "trainer.py").read_text(encoding="utf-8").splitlines())
    # Rounded numbers, which a change of some files need not touch.
    assert abs(lines_of(source) - package) <= 1500
    assert abs(lines_of(source / "verifiers") - verifiers) <= 1000
