"""The folder of a model that vLLM reads, and the cache of what vLLM compiled."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_helpers import tiny

from rlvr.core.cache_folder import cache_folder
from rlvr.rollout.vllm.model_folder import content_digest, model_folder, stable_copy


def test_a_model_has_one_folder_whoever_starts_and_nothing_there_is_changed(monkeypatch, tmp_path):
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "cache"))
    policy = tiny()
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(lambda number: model_folder(policy, tmp_path / str(number)), range(8)))
    (folder,) = set(result)
    assert sorted(folder.parent.iterdir()) == [folder]  # nothing is left of those that came second
    assert {"config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not list(folder.rglob("*.safetensors"))

    (folder / "config.json").write_text("{}")  # not what its name says: left alone, and not used
    second = model_folder(policy, tmp_path / "second")
    assert second.name == f"{folder.name}-2"
    assert (folder / "config.json").read_text() == "{}"
    assert model_folder(policy, tmp_path / "third") == second

    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / content_digest(second)).write_text("a file of the user's")
    assert stable_copy(second, taken).name == second.name
    assert (taken / content_digest(second)).read_text() == "a file of the user's"


def test_a_cache_that_cannot_be_written_costs_compiling_alone(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLVR_CACHE", str(tmp_path / "file"))
    scratch = tmp_path / "scratch"
    assert model_folder(tiny(), scratch) == scratch / "model"
    assert (scratch / "model" / "config.json").is_file()
    assert "set RLVR_CACHE to a folder that can be written to" in caplog.text


@pytest.mark.parametrize("cache", [None, "~/cache"])
def test_a_user_without_a_home_has_no_cache_and_a_run_all_the_same(monkeypatch, tmp_path, caplog, cache):
    """A container under a user id that its user database does not have."""
    for name in ("HOME", "XDG_CACHE_HOME", "RLVR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    if cache is not None:
        monkeypatch.setenv("RLVR_CACHE", cache)
    monkeypatch.setattr(os, "getuid", lambda: 987_654_321)
    assert model_folder(tiny(), tmp_path) == tmp_path / "model"
    assert "set RLVR_CACHE" in caplog.text


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"RLVR_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/rlvr"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/somebody/.cache/rlvr"),
        ({}, "/home/somebody/.cache/rlvr"),
    ],
)
def test_the_cache_is_the_users(monkeypatch, variables, folder):
    for name in ("RLVR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/somebody", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)
