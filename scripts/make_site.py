"""Build the documentation site from docs/ and the docstrings: no network, and a warning is an error.

    python scripts/make_site.py [FOLDER]       FOLDER: `site` where none is given; an earlier site there is replaced
    python -m http.server -d site              then look at it; opened as files the pages work too, without the search

It needs the extra `docs` (`pip install '.[docs]'`). The pages of docs/ are Markdown as code hosts show it. For the
site they are converted in a temporary folder: notebooks become pages with their outputs, files outside docs/ that a
page links to become pages under `files/`, and nested lists are indented as Python-Markdown requires. mkdocs.yml has the
rest.

Exit codes: 0 built, 1 with the builder's message, 2 where the folder holds something else or the builder is missing.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = ".made-by-rlvr"
"""A file in a built site: a folder without it is not replaced."""
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"<!-- not on the site -->\n.*?<!-- end -->\n", re.DOTALL)
"""What only a reader of the repository needs to know."""
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".slurm": "bash", ".md": "markdown"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return build(Path(given[0] if given else ROOT / "site"))


def build(site: Path) -> int:
    """Build the site into the folder `site`, in the place of an earlier one; the builder's exit code."""
    if site.exists() and not (site / MARK).is_file() and any(site.iterdir()):
        print(f"error: {site} exists and holds no site: give another folder, or remove it first", file=sys.stderr)
        return 2
    if importlib.util.find_spec("zensical") is None:
        print("error: the site's builder is missing; in a checkout: bash scripts/environment.sh docs", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        shutil.copy(ROOT / "mkdocs.yml", stage)
        (stage / "src").symlink_to(ROOT / "src")
        lay_out(stage / "docs")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        code = subprocess.run(command, cwd=stage, check=False).returncode
        if code == 0:
            (stage / "site" / MARK).touch()
            shutil.rmtree(site, ignore_errors=True)
            shutil.move(stage / "site", site)
    return code


def lay_out(target: Path) -> None:
    """Write what of docs/ the site is built from into the folder `target`."""
    shutil.copytree(ROOT / "docs", target, ignore=shutil.ignore_patterns("*.md", "*.ipynb", ".*"))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        write(target / page.relative_to(ROOT / "docs"), for_the_site(page, page.read_text(encoding="utf-8"), target))
    for page in sorted((ROOT / "docs").rglob("*.ipynb")):
        shown = (target / page.relative_to(ROOT / "docs")).with_suffix(".md")
        write(shown, for_the_site(page, notebook_page(page, shown), target))


def for_the_site(page: Path, text: str, target: Path) -> str:
    """The Markdown of a page of docs/ as the site's builder wants it."""
    text = ELSEWHERE.sub("", text)

    def link(found: re.Match[str]) -> str:
        aim = (page.parent / found[1]).resolve()
        if aim.suffix == ".ipynb":
            return found[1].removesuffix(".ipynb") + ".md"
        if aim.is_relative_to(ROOT / "docs") or not aim.is_file():
            return found[1]
        shown = target / "files" / f"{aim.relative_to(ROOT)}.md"
        write(shown, file_page(aim))
        return os.path.relpath(shown, target / page.parent.relative_to(ROOT / "docs"))

    def prose(part: str) -> str:
        part = LINK.sub(link, part)
        return re.sub(r"^ +(?=[-*] )", lambda indent: indent[0] * 2, part, flags=re.MULTILINE)

    return "".join(part if part.startswith("```") else prose(part) for part in FENCE.split(text))


def file_page(path: Path) -> str:
    """A file of the repository as a page; not found by the search."""
    code = f"``````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8').rstrip()}\n``````\n"
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {path.name}\n\n`{path.relative_to(ROOT)}`\n\n{code}"


def notebook_page(path: Path, shown: Path) -> str:
    """A notebook as Markdown: its text, its code in fences, and its outputs; pictures become files beside `shown`."""
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = shown.with_name(f"{shown.stem}-{number}.png")
                picture.parent.mkdir(parents=True, exist_ok=True)
                picture.write_bytes(base64.b64decode("".join(data["image/png"])))
                parts.append(f"![Output of the cell]({picture.name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def write(path: Path, text: str) -> None:
    """Write a file and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
