"""The code blocks of README and docs: what a reader types, and which of it needs more than a CPU and a checkout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"#\s*(?:index|hub|gpu|cluster|container)\b")
"""The mark of a command that is not run: a package index, the hub, a GPU, a cluster or a container engine."""
NAME = re.compile(r"# ([\w/-]+\.(?:py|yaml|jsonl))\n")
"""The first line of a block that shows a file, or of YAML that uses it."""
SUFFIX = {"python": ".py", "yaml": ".yaml", "json": ".jsonl"}
TYPED = re.compile(r"^\s*(?:\$ )?(?:python|pip|bash|rlvr|torchrun|accelerate|sbatch|docker) ", re.MULTILINE)
"""A command in a block without a language, which nobody would find to run."""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The name of the file that the block shows, if it shows one."""
        named = NAME.match(self.text)
        return named[1] if named and named[1].endswith(SUFFIX.get(self.language, "?")) else None


def pages(root: Path) -> list[str]:
    """The pages that readers see, relative to the root of the repository."""
    found = [root / "README.md", root / "CONTRIBUTING.md", root / "SECURITY.md", *sorted((root / "docs").rglob("*.md"))]
    return [path.relative_to(root).as_posix() for path in found]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for language, block in BLOCK.findall(text):
        yield Block({"sh": "bash"}.get(language, language), block)


def commands(block: str) -> list[str]:
    """The commands of a bash block: a command that goes on in the next lines, or a loop, is one."""
    found: list[str] = []
    open_loop = False
    unfinished = ""
    for line in block.replace("\\\n", " ").splitlines():
        unfinished += f"\n{line}" if unfinished else line
        open_loop = open_loop or line.startswith("for ")
        if open_loop and not line.startswith("done"):
            continue
        open_loop = False
        # A text in quotation marks may have several lines.
        if unfinished.count('"') % 2 == 0 and unfinished.partition(" #")[0].count("'") % 2 == 0:
            if unfinished.strip() and not unfinished.startswith("#"):
                found.append(unfinished)
            unfinished = ""
    return [*found, unfinished] if unfinished.strip() else found


def without_mark(block: str) -> list[str]:
    """The commands of a bash block that have no mark."""
    return [command for command in commands(block) if not NEEDS.search(command)]
