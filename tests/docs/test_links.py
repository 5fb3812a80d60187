"""Links and paths in the docs lead somewhere in the repository, and nowhere outside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.ipynb"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
IN_THE_REPOSITORY = re.compile(r"(?<![\w/.-])(?:src|tests|scripts|configs|docs)/[\w./-]*[\w/]")
OF_A_MACHINE = re.compile(
    r"(?<![\w.:/])(?:/(?:work|tmp|home|root|mnt|data|Users|opt|usr|var|workspace)/|[A-Z]:\\|file://)|(?<!\w)~/"
)


def text_of(page: Path) -> str:
    """A page as Markdown; of a notebook, the sources of its cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_lead_to_a_file_and_a_heading(name):
    page, broken = ROOT / name, []
    for link in LINK.findall(prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert not broken


# docs/papers.md names files of the authors' repositories; tests/recipes checks those of ours.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/papers.md"])
def test_paths_of_the_repository_are_there(name):
    missing = [path for path in IN_THE_REPOSITORY.findall(text_of(ROOT / name)) if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("name", NAMES)
def test_no_page_names_a_path_of_a_machine(name):
    assert not OF_A_MACHINE.findall(text_of(ROOT / name))


def test_the_index_lists_every_page():
    index = ROOT / "docs/README.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(text_of(index))}
    assert listed >= {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index}


def test_the_home_page_says_what_the_library_is_and_names_pages_by_their_titles():
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    introduction, rest = text.split("## Install")
    assert len(introduction.strip().split("\n\n")) == 4  # the title, a paragraph, a picture, a paragraph
    assert re.search(r"^!\[[^\]]+\]\([\w/]+\.svg\)$", introduction, re.MULTILINE)
    assert "```bash" in rest and "from rlvr import GRPOTrainer" in rest
    assert "../README.md" in introduction  # which so becomes a page of the site
    titles = re.findall(r"\[([^\]]+)\]\([^)]+\)", text)
    assert [title for title in titles if title.endswith((".md", ".ipynb"))] == []
    for block in re.findall(r"```(?:bash|python)\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            assert len(line) <= 110
    compile(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], "home", "exec")


def test_code_beside_trls_is_not_cut():
    """Two blocks below each other, each narrow enough for the site."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/from-trl.md").read_text(encoding="utf-8"), re.DOTALL)
    assert sum("GRPOTrainer(" in block for block in blocks[:2]) == 2
    assert max(len(line) for block in blocks[:2] for line in block.splitlines()) <= 90
