"""Names that the glossary replaced do not come back, and every term that it gives as a name of the library is one."""

from __future__ import annotations

import io
import re
import tokenize

REPLACED = {
    "Ahead",
    "Collected",
    "Crew",
    "Crews",
    "Elsewhere",
    "Farm",
    "Guest",
    "Late",
    "Means",
    "Parts",
    "Seal",
    "Setting",
    "Supply",
    "Tally",
    "Watchdog",
    "give_back",
    "liked",
    "lifeline",
    "look_ahead",
    "refill",
    "slopes",
    "teaches",
}
"""Names of the version before. The tables of moved names hold them as text."""

OF_ANOTHER_KIND = {"verifiers/code/sandbox": {"Setting"}, "planner": {"slopes"}}
"""Folder -> names that mean something else there: the setting of a sandbox, the slopes of lines."""


def test_replaced_names_are_gone(root):
    found = []
    for path in sorted((root / "src/rlvr").rglob("*.py")):
        place = path.relative_to(root / "src/rlvr").as_posix()
        allowed = set().union(*(names for folder, names in OF_ANOTHER_KIND.items() if place.startswith(folder)))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME and token.string in REPLACED - allowed:
                found.append(f"{place}:{token.start[0]} {token.string}")
    assert not found


def test_names_in_the_glossary_are_names_of_the_library(root):
    page = (root / "docs/glossary.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "src/rlvr").rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", page))
    assert len(named) >= 5
    for name in named:
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), name


def test_no_term_stands_twice(root):
    page = (root / "docs/glossary.md").read_text(encoding="utf-8")
    terms = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    terms = [term for term in terms if term != "term"]
    assert len(terms) == len(set(terms)) and len(terms) > 30
