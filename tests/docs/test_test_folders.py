"""Tests lie where the code that they test lies: a folder of tests has the path of a package of src/rlvr."""

from __future__ import annotations

from pathlib import Path

import rlvr

TESTS = Path(__file__).parents[1]
SOURCE = Path(rlvr.__file__).parent
WITHOUT_A_PACKAGE = {
    "components": "components.py, registry.py and testing.py",
    "docs": "the pages, the notebooks, and what the pages say of the code",
    "gpu": "what only a GPU can show",
    "gpu_kit": "scripts/gpu",
    "regression": "recorded runs, to the last bit",
    "rollout/vllm_engines": "rollout/vllm: a folder `vllm` on the path of imports would hide that vLLM is missing",
    "trainer": "trainer.py: whole runs",
}


def folders() -> set[str]:
    """The folders below tests that hold test files, by their paths."""
    return {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}


def test_a_folder_of_tests_has_the_path_of_a_package():
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    assert folders() - packages == set(WITHOUT_A_PACKAGE)


def test_no_two_test_files_share_a_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))
