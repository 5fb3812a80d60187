"""docs/config.md and docs/metrics.md are what the code says."""

from __future__ import annotations

import pytest

from rlvr.config import Config


@pytest.fixture
def make_docs(script):
    """scripts/make_docs.py as a module."""
    return script("make_docs")


def test_the_generated_pages_are_up_to_date(make_docs, capsys):
    code = make_docs.main(["--check"])
    assert code == 0, capsys.readouterr().out


def test_the_check_finds_stale_and_missing_pages_and_writes_nothing(make_docs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert make_docs.main([]) == make_docs.main(["--check"]) == 0
    (tmp_path / "config.md").write_text("old")
    (tmp_path / "metrics.md").unlink()
    capsys.readouterr()
    assert make_docs.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "docs/config.md" in said and "docs/metrics.md" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.md", "papers.md"]
    assert (tmp_path / "config.md").read_text() == "old"


def test_every_key_of_the_configuration_is_on_the_page_and_described(make_docs):
    page = make_docs.config_page()
    for name, field in Config.model_fields.items():
        keys = [f"{name}.{key}" for key in getattr(field.annotation, "model_fields", {})] or [name]
        assert all(f"| `{key}` |" in page for key in keys), name
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert "0x" not in page and "<class" not in page
