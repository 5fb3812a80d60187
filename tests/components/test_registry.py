"""The registry: names, files and entry points -> pieces."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from rlvr import registry
from rlvr.errors import ConfigError
from small_pieces import PIECES


@pytest.fixture
def fresh(monkeypatch):
    """What a test registers is forgotten after it."""
    registry.names("reward")
    monkeypatch.setitem(registry._components, "reward", dict(registry._components["reward"]))


def define(module="cell", name="bonus"):
    def bonus(batch, *, size: int = 1):
        return size

    bonus.__module__, bonus.__qualname__ = module, name
    return bonus


def test_a_registered_piece_is_found_and_built_with_its_options(fresh):
    piece = registry.register_reward("bonus")(define())
    assert registry.find("reward", "bonus") is piece
    assert "bonus" in registry.names("reward")
    assert registry.build("reward", "bonus") is piece
    assert registry.build("reward", {"name": "bonus", "size": "3"})(None) == 3


def test_a_taken_name_is_refused_and_the_first_piece_stays(fresh):
    first = registry.register_reward("bonus")(define())
    with pytest.raises(ConfigError, match=r"the reward 'bonus' is taken by cell\.bonus: choose another name"):
        registry.register_reward("bonus")(define(name="other"))
    with pytest.raises(ConfigError, match=r"is taken by rlvr\.rewards\.controls\.length"):
        registry.register_reward("length")(define())
    assert registry.find("reward", "bonus") is first


def test_a_cell_that_is_run_again_replaces_its_piece(fresh):
    registry.register_reward("bonus")(define())
    again = registry.register_reward("bonus")(define())
    assert registry.find("reward", "bonus") is again


def test_unknown_kinds_and_names_suggest_the_nearest():
    with pytest.raises(ConfigError, match="there is no kind of component 'rewards'; did you mean 'reward'"):
        registry.register("rewards", "x")
    with pytest.raises(ConfigError, match="there is no advantage 'gruop'; did you mean 'group'"):
        registry.find("advantage", "gruop")


def test_a_piece_of_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PIECES)
    assert registry.build("verifier", f"{path}:evens")("24") == 1.0
    assert registry.build("verifier", {"name": f"{path}:Odd", "weight": 2}).weight == 2.0
    assert registry.find("verifier", f"{path}:evens") is registry.find("reward", f"{path}:evens")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.py:Odd", "there is no file"),
        ("mine.py:Od", "has no class or function 'Od'; did you mean 'Odd'?"),
        ("mine.py:CONSTANT", "has no class or function 'CONSTANT'"),
        ("mine.py", "mine.py:NAME; it has evens, slow, "),
        ("raises.py:Odd", "cannot be imported: ZeroDivisionError"),
        ("syntax.py:Odd", "cannot be imported: SyntaxError"),
        ("twice.py:Odd", "cannot be imported: ConfigError: the reward 'length' is taken"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, said):
    (tmp_path / "mine.py").write_text(PIECES)
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "twice.py").write_text(
        "from rlvr import register_reward\n@register_reward('length')\ndef f(batch): ..."
    )
    before = set(sys.modules)
    for _ in range(2):  # the second time as well: a broken file leaves no half-made module behind
        with pytest.raises(ConfigError) as caught:
            registry.find("verifier", f"{tmp_path}/{name}")
        assert said in str(caught.value)
        assert name.split(":")[0] in str(caught.value)
    assert not any("raises" in added or "syntax" in added for added in set(sys.modules) - before)


def test_entry_points_of_installed_packages(monkeypatch, tmp_path):
    (tmp_path / "their_package.py").write_text(PIECES)
    (tmp_path / "their_broken_package.py").write_text("import not_installed_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, f"{module}:Odd", "rlvr.verifiers")
        for name, module in (("theirs", "their_package"), ("broken", "their_broken_package"), ("math", "their_package"))
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries.select(group=group))
    # Not the kept list, and none is kept of these.
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)
    assert registry.build("verifier", {"name": "theirs", "weight": 0.5}).weight == 0.5
    assert "theirs" in registry.names("verifier")
    assert (
        registry.find("verifier", "math").__module__ == "rlvr.verifiers.math.math_verifier"
    )  # the library's own name stays its own
    with pytest.raises(ConfigError, match="did you mean 'theirs'"):
        registry.find("verifier", "their")
    with pytest.raises(ConfigError, match="'broken': their_broken_package:Odd cannot be imported: ModuleNotFoundError"):
        registry.find("verifier", "broken")
    with pytest.raises(ConfigError, match="there is no reward 'theirs'"):
        registry.find("reward", "theirs")


@pytest.mark.parametrize("kind", sorted(registry.PACKAGES))
def test_every_registered_piece_says_what_it_is(kind):
    for name in registry.names(kind):
        piece = registry.find(kind, name)
        if piece.__module__.startswith("rlvr."):  # other tests may have registered pieces of theirs
            assert (piece.__doc__ or "").strip(), f"{kind} {name} has no docstring"
