"""The folder of the recipes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def folder(request):
    """configs/papers"""
    return request.config.rootpath / "configs/papers"
