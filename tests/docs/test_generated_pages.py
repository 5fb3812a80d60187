"""docs/config.md and docs/metrics.md are what the code says."""

from __future__ import annotations

import pytest

from rlvr.config import Config
from rlvr.monitor.metrics import FAMILIES, METRICS

SIZES = ("0.5B", "1.5B", "7B", "14B", "32B")
"""The models of the table of docs/memory.md."""
IN_THE_GATE = "0.5B"
"""The one whose rows are planned in the gate: it takes the least time."""


@pytest.fixture
def make_docs(script):
    """scripts/make_docs.py as a module."""
    return script("make_docs")


def test_the_page_of_metrics_names_every_metric(make_docs):
    page = make_docs.metrics_page()
    assert all(f"| `{name}` |" in page for name in METRICS)
    assert all(f"| `{prefix}*` |" in page for prefix in FAMILIES)
    assert "|share|" not in page


@pytest.mark.gate
def test_the_generated_pages_are_up_to_date(make_docs, monkeypatch, capsys):
    """All but the table of what fits, whose passes take minutes."""
    page = (make_docs.DOCS / "memory.md").read_text()
    assert page.count(make_docs.TABLE) == page.count(make_docs.END_OF_TABLE) == 1
    written = page.split(make_docs.TABLE)[1].split(make_docs.END_OF_TABLE)[0].strip()
    monkeypatch.setattr(make_docs, "memory_table", lambda: written)
    code = make_docs.main(["--check"])
    assert code == 0, capsys.readouterr().out
    monkeypatch.setattr(make_docs, "memory_table", lambda: written + " ")
    assert make_docs.main(["--check"]) == 1
    assert "docs/memory.md" in capsys.readouterr().out


@pytest.mark.gate
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size == IN_THE_GATE else pytest.mark.slow) for size in SIZES]
)
def test_the_table_of_what_fits_is_up_to_date(make_docs, script, size):
    table = script("memory_table")
    assert tuple(model.rpartition("-")[2] for model in table.MODELS) == SIZES
    page = (make_docs.DOCS / "memory.md").read_text()
    model = table.MODELS[SIZES.index(size)]
    assert [line for line in page.splitlines() if line.startswith(f"| {size} | ")] == table.rows(model)


@pytest.mark.slow
def test_the_check_finds_stale_and_missing_pages_and_writes_nothing(make_docs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_docs, "DOCS", tmp_path)
    assert make_docs.main([]) == make_docs.main(["--check"]) == 0
    (tmp_path / "config.md").write_text("old")
    (tmp_path / "metrics.md").unlink()
    capsys.readouterr()
    assert make_docs.main(["--check"]) == 1
    output = capsys.readouterr().out
    assert "docs/config.md" in output and "docs/metrics.md" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.md", "papers.md"]
    assert (tmp_path / "config.md").read_text() == "old"


def test_every_key_of_the_configuration_is_on_the_page_and_described(make_docs):
    page = make_docs.config_page()
    for name, field in Config.model_fields.items():
        keys = [f"{name}.{key}" for key in getattr(field.annotation, "model_fields", {})] or [name]
        assert all(f"| `{key}` |" in page for key in keys), name
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert "0x" not in page and "<class" not in page
