"""Modules that moved and names that changed are found under their old names for one version."""

from __future__ import annotations

import importlib
import sys

import pytest

from rlvr.core.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_name_gives_the_module_and_says_where_it_is_now(old):
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {MOVED[old]}"):
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
