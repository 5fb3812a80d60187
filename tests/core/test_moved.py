"""Modules, names and attributes of the version before are found, with a notice, and each has a place now."""

from __future__ import annotations

import importlib
import operator
import re
import sys
import warnings
from pathlib import Path

import pytest

import rlvr.policy
from rlvr import GRPOTrainer
from rlvr.core.moved import MOVED
from rlvr.run.trainer_attributes import MovedTrainerAttributes
from small_run import TREE, overlaid


@pytest.mark.parametrize("old", MOVED)
def test_a_module_that_moved_is_found(old):
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {MOVED[old]}: the old name goes"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__spec__.name == MOVED[old]


def test_a_module_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rlvr.nothing_of_the_kind")


def test_an_old_name_of_a_class_gives_the_class_and_says_its_name_now():
    losses = importlib.import_module("rlvr.losses")
    with pytest.warns(FutureWarning, match=r"rlvr\.losses\.Component is now rlvr\.losses\.ObjectiveTerm"):
        assert losses.Component is losses.ObjectiveTerm
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = losses.nothing_of_the_kind


def test_a_name_that_moved_to_another_package_is_found():
    with pytest.warns(
        FutureWarning, match=r"rlvr\.policy\.learning_rate is now rlvr\.stages\.stage_base\.learning_rate"
    ):
        assert rlvr.policy.learning_rate is importlib.import_module("rlvr.stages.stage_base").learning_rate


def test_attributes_of_the_trainer_that_moved_are_found(tmp_path):
    tree = overlaid(TREE, {"run": {"dir": str(tmp_path)}})
    with GRPOTrainer(None, [{"id": "t", "prompt": "1", "answer": "1"}], lambda completion: 1.0, tree) as trainer:
        for old, path in MovedTrainerAttributes.moved_attributes.items():
            with pytest.warns(FutureWarning, match=f"GRPOTrainer.{old} is now {path}"):
                result = getattr(trainer, old)
            now = operator.attrgetter(path)(trainer)
            assert result is now or result == now, old
        with pytest.raises(AttributeError, match="no attribute 'enigne'"):
            _ = trainer.enigne
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert trainer.step == 0 and trainer.metrics == []


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_takes_no_name_of_its_package(old):
    """Python sets an imported module as an attribute of its package."""
    package, _, name = old.rpartition(".")
    assert name not in getattr(importlib.import_module(package), "__all__", ())


def test_nothing_in_the_project_names_an_old_module():
    """Imports in strings included, which processes of the tests run."""
    root = Path(__file__).parents[2]
    named = []
    old_names = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, MOVED))})(?!\w)")
    for path in sorted(
        path for folder in ("src", "tests", "scripts", "docs", "configs") for path in root.glob(f"{folder}/**/*")
    ):
        if path.suffix not in {".py", ".md", ".yaml", ".sh"} or path.name == "moved.py":
            continue
        text = path.read_text(encoding="utf-8")
        named += [f"{path.relative_to(root)}: {old}" for old in old_names.findall(text)]
        for package, names in re.findall(r"from (rlvr[\w.]*) import ([^\n(]+|\([^)]+\))", text):
            imported = [f"{package}.{name.split(' as ')[0].strip()}" for name in names.strip("()").split(",")]
            named += [f"{path.relative_to(root)}: {old}" for old in imported if old in MOVED]
    assert not named
