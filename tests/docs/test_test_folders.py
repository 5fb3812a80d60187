"""Tests lie where the code that they test lies, by folder and by name, or stand in the table of tests/README.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import rlvr

TESTS = Path(__file__).parents[1]
SOURCE = Path(rlvr.__file__).parent
PACKAGES_OF = {
    "components": [""],
    "trainer": [""],
    "rollout/vllm_engines": ["rollout/vllm"],
    "replay": ["replay", "diff"],
}
"""Folders of tests whose packages have another path, as tests/README.md says."""


def table() -> dict[str, tuple[str, list[str]]]:
    """Each row of tests/README.md: the file or folder of tests, its behaviour, and the code that it runs."""
    rows = re.findall(
        r"^\| `([^`]+)` \| (.*) \| (.*) \|$", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == len({test for test, _, _ in rows})
    return {test: (behaviour, re.findall(r"`([^`]+)`", code)) for test, behaviour, code in rows}


def files_of_tests() -> list[str]:
    """The test files, by their paths below tests."""
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py"))


def named_after_a_module(path: str) -> bool:
    """`test_MODULE.py` or `test_MODULE_ASPECT.py` in the folder of the module's package; a command has its own name."""
    folder, _, name = path.rpartition("/")
    modules = []
    for package in PACKAGES_OF.get(folder, [folder]):
        files = {file.stem for file in (SOURCE / package).glob("*.py")}
        modules += files - {"__init__", "__main__"}
        if package and "__main__" in files:
            modules.append(package.rpartition("/")[2])
    subject = name.removeprefix("test_").removesuffix(".py")
    return any(subject == module or subject.startswith(f"{module}_") for module in modules)


def in_the_table(path: str, rows: Iterable[str]) -> bool:
    return any(path == row or (row.endswith("/") and path.startswith(row)) for row in rows)


def misnamed(paths: Iterable[str], rows: Iterable[str]) -> list[str]:
    """The test files that neither a module nor the table of behaviours accounts for."""
    return [path for path in paths if not named_after_a_module(path) and not in_the_table(path, rows)]


def test_a_test_file_is_named_after_a_module_or_stands_in_the_table():
    assert misnamed(files_of_tests(), table()) == []


def test_a_misnamed_file_is_found():
    right = ["losses/test_clip.py", "losses/test_clip_edges.py", "train/test_train.py", "trainer/test_records.py"]
    wrong = ["losses/test_clipped.py", "losses/test_losses.py", "data/test_clip.py", "test_clip.py", "n/test_n.py"]
    listed = ["run/test_kills.py", "docs/test_anything.py"]
    assert misnamed([*right, *wrong, *listed], table()) == wrong


def test_the_table_has_no_stale_entry():
    rows, files = table(), files_of_tests()
    for row, (behaviour, code) in rows.items():
        assert any(in_the_table(path, [row]) for path in files), f"no test is in {row}"
        assert row.endswith("/") or not named_after_a_module(row), f"{row} is named after a module"
        assert not in_the_table(row, rows.keys() - {row}), f"the folder of {row} is in the table"
        assert behaviour.strip() and code
        missing = [path for path in code if not (TESTS.parent / path).exists()]
        assert not missing, f"{row} names {missing}"


def test_no_two_test_files_share_a_name():
    names = [path.rpartition("/")[2] for path in files_of_tests()]
    assert len(names) == len(set(names))
