"""The documentation site: it builds without a warning, loads nothing from elsewhere, and every link and anchor leads
somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
import yaml
from public_names import public_names

ROOT = Path(__file__).resolve().parents[2]
VOID = {"a": "href", "img": "src", "script": "src", "link": "href"}


class Page(HTMLParser):
    """The links, anchors, loaded files and words of a built page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.tags: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags.append(tag)
        self.ids |= {named[key] for key in ("id", "name") if named.get(key)}
        target = named.get(VOID.get(tag, ""))
        if target and tag == "a":
            self.links.append(target)
        elif target and named.get("rel") != "canonical":
            self.loaded.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built without a network where the machine lets us take it away: path within it -> page."""
    folder = tmp_path_factory.mktemp("site") / "site"
    alone = ["unshare", "--map-root-user", "--net"]
    offline = (
        shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    )
    command = [*(alone if offline else []), sys.executable, str(ROOT / "scripts/make_site.py"), str(folder)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "No issues found" in done.stdout, done.stdout
    return folder, {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}


def inside(folder: Path, name: str, link: str) -> tuple[str, str] | None:
    """The file within the site and the anchor that a link of the page `name` leads to; None for one that leads out."""
    if re.match(r"\w+:|//", link):
        return None
    path, anchor = urldefrag(link)
    target = (folder / name).parent / unquote(path) if path else folder / name
    target = target / "index.html" if target.is_dir() else target
    return target.resolve().relative_to(folder.resolve()).as_posix(), unquote(anchor)


def dead_links(folder: Path, pages: dict[str, Page]) -> list[str]:
    """The links within the site that lead nowhere."""
    dead = []
    for name, page in pages.items():
        if name == "404.html":  # its links begin at the root of wherever the site will lie
            continue
        for link in [*page.links, *page.loaded]:
            result = inside(folder, name, link)
            if result is None:
                continue
            file, anchor = result
            there = (folder / file).is_file() and (not anchor or file not in pages or anchor in pages[file].ids)
            dead += [] if there or anchor == "__top" else [f"{name}: {link}"]
    return dead


@pytest.mark.gate
def test_no_link_is_dead(site):
    folder, pages = site
    assert len(pages) > 30
    assert not dead_links(folder, pages)


def test_a_dead_link_and_a_dead_anchor_would_be_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="x">A</h1><a href="b.html">1</a> <a href="#x">2</a> <a href="#y">3</a>')
    pages = {"a.html": Page(tmp_path / "a.html")}
    assert dead_links(tmp_path, pages) == ["a.html: b.html", "a.html: #y"]


def test_the_pages_load_nothing_from_elsewhere(site):
    _, pages = site
    assert not {link for page in pages.values() for link in page.loaded if re.match(r"\w+:|//", link)}


def test_every_page_of_docs_is_in_the_navigation_and_on_the_site(site):
    _, pages = site
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = leaves(yaml.safe_load(text)["nav"])
    in_nav = set(listed)
    assert len(listed) == len(in_nav)
    docs = {path.relative_to(ROOT / "docs") for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)}
    assert in_nav == {path.with_suffix(".md").as_posix() for path in docs}
    built = {name.removesuffix("README.md") + "index.html" if name.endswith("README.md") else name for name in in_nav}
    assert {name.removesuffix(".md") + ".html" if name.endswith(".md") else name for name in built} <= set(pages)


def test_every_page_can_be_reached_from_the_first(site):
    folder, pages = site
    seen, todo = set(), ["index.html"]
    while todo:
        name = todo.pop()
        if name in seen or name not in pages:
            continue
        seen.add(name)
        todo += [result[0] for link in pages[name].links if (result := inside(folder, name, link))]
    assert set(pages) - seen == {"404.html"}


def leaves(tree) -> list[str]:
    """The paths of a navigation tree."""
    if isinstance(tree, str):
        return [tree]
    return [path for part in (tree.values() if isinstance(tree, dict) else tree) for path in leaves(part)]


def test_every_public_name_is_in_the_reference(site):
    _, pages = site
    homes = {f"{home}.{name}" for name, home in public_names().items()}
    assert not homes - pages["api.html"].ids


def test_markdown_comes_out_as_it_was_meant(site):
    folder, pages = site
    for name in pages:
        text = (folder / name).read_text(encoding="utf-8")
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "```" not in prose and "\n:::" not in prose and "](" not in prose, name
        assert not re.search(r"<p>[^<]*\n[-*] ", prose), f"{name}: a list that is no list"
    nested = (folder / "config.html").read_text(encoding="utf-8")
    assert re.search(r"<li>\s*<code>math</code>.*?<ul>\s*<li>\s*<code>methods</code>", nested, re.DOTALL)
    assert pages["papers.html"].tags.count("tr") > 45


def test_links_out_of_docs_become_pages_of_the_site(tmp_path, script):
    make_site = script("make_site")
    page = ROOT / "docs/howto/lora.md"
    text = (
        "<!-- not on the site -->\nb\n<!-- end -->\n"
        "- a\n  - [c](../../configs/quickstart.yaml) [d](../config.md#x) [e](../notebooks/first_run.ipynb)\n```\n "
        " - [f](x)\n```\n"
    )
    assert make_site.for_the_site(page, text, tmp_path) == (
        "- a\n    - [c](../files/configs/quickstart.yaml.md) [d](../config.md#x) "
        "[e](../notebooks/first_run.md)\n```\n  - [f](x)\n```\n"
    )
    shown = (tmp_path / "files/configs/quickstart.yaml.md").read_text(encoding="utf-8")
    assert (ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8").rstrip() in shown


def test_a_missing_builder_is_named_with_its_fix(tmp_path, script, monkeypatch, capsys):
    make_site = script("make_site")
    monkeypatch.setattr(make_site.importlib.util, "find_spec", lambda name: None)
    assert make_site.build(tmp_path / "site") == 2
    assert "bash scripts/environment.sh docs" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path, script):
    shown = tmp_path / "notebooks/first_run.md"
    text = script("make_site").notebook_page(ROOT / "docs/notebooks/first_run.ipynb", shown)
    assert "```text\nstopped after " in text
    pictures = re.findall(r"!\[[^]]+\]\(([\w-]+\.png)\)", text)
    assert [path.name for path in shown.parent.iterdir()] == pictures
    assert shown.with_name(pictures[0]).read_bytes().startswith(b"\x89PNG")
