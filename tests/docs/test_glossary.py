"""Names and words that the glossary replaced do not come back, in code or prose, and every term that it gives as a name
of the library is one."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

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
"""Names of the version before."""

OF_ANOTHER_KIND = {"verifiers/code/sandbox": {"Setting"}, "planner": {"slopes"}}
"""Folder -> names that mean something else there: the setting of a sandbox, the slopes of lines."""

BEFORE_SPACE = ("no", "more", "enough", "as", "leave", "leaves", "leaving")
ROOM = rf"rooms|{''.join(f'(?<!{word} )' for word in BEFORE_SPACE)}room(?! (for|left|in|at)\b)"
WORDS = {
    r"mend(s|ed|ing)?": "fix",
    r"kin": "related, similar",
    r"talk(s|ed|ing)?": "conversation, interact",
    ROOM: "package",
    r"floors|(ground|upper|lower|next|same) floor|floor (above|below)": "layer",
    r"houses?": "architecture, family",
    r"pieces?": "component",
    r"crews?": "worker group",
    r"farms?": "engine router",
    r"guests?": "background tracker",
    r"tall(y|ies)": "task result",
    r"lifelines?": "parent death",
    r"refill(s|ed|ing)?": "dynamic sampling",
    r"seal(s|ed|ing)?": "write the manifest",
    r"ow(e|es|ed)": "requeued",
    r"draws? ([\w,]+ ){0,8}(give|gives|given) back|(give|gives|given) back (the )?draws?": "roll back, requeue",
    r"(said|says|say)( so| it)? once": "one warning",
    r"(what|everything|all)( that)? (it|(the|a|this) \w+) (was|is|can be) told": "setting, received",
}
"""Word of the version before, as a whole word -> the words for it now. `room` for memory or space is no such word: it
follows `no`, `more`, `enough`, `as` or `leave`, or stands before `for`, `left`, `in` or `at`."""

OTHER_MEANINGS = {
    "docs/gpu.md": {r"pieces?"},  # files of at most 64 MiB, scripts/gpu/pieces.py
    "src/rlvr/verifiers/math/counted.py": {ROOM, r"pieces?", r"houses?", r"farms?", r"guests?"},  # a list of nouns
    "src/rlvr/core/sentences.py": {r"pieces?"},  # of a text, between ends of sentences
    "src/rlvr/data/replies.py": {r"pieces?"},  # in one piece
    "src/rlvr/verifiers/code/sandbox": {r"seal(s|ed|ing)?"},  # inside/sealing.py
}
"""File or folder -> words of the list that mean something else there."""


def prose_of_page(text: str) -> str:
    """A page without fenced blocks, inline code and targets of links; its lines keep their numbers."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)\s]*\)", "]", re.sub(r"`[^`\n]*`", "``", text))


def prose_of_code(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments, docstrings and messages: strings of at least two words, without what an f-string
    computes and without inline code."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # From Python 3.12 an f-string is several tokens.
        if token.type in {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}:
            words = re.sub(r"`[^`\n]*`", "``", token.string)
            if re.match(r"(?i)[rb]*f", words):
                words = re.sub(r"\{[^{}]*\}", "{}", words)
            if " " in words.strip():
                yield token.start[0], words


def replaced_words(place: str, line: int, text: str) -> Iterator[str]:
    """The words of the list in a text that begins at a line of a file, each with its place and the word for it now."""
    allowed = set().union(*(words for where, words in OTHER_MEANINGS.items() if place.startswith(where)))
    for pattern, instead in WORDS.items():
        if pattern not in allowed:
            for found in re.finditer(rf"(?i)(?<![\w-])(?:{pattern})(?![\w-])", re.sub(r"\s", " ", text)):
                number = line + text[: found.start()].count("\n")
                yield f"{place}:{number} {found[0]} (now: {instead})"


def words_of(root: Path, path: Path) -> list[str]:
    """The replaced words of a page, a module, or all modules of a folder."""
    result = []
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        place, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        prose = [(1, prose_of_page(text))] if file.suffix == ".md" else prose_of_code(text)
        result += [word for line, words in prose for word in replaced_words(place, line, words)]
    return result


def test_replaced_words_are_gone_from_the_pages(root):
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    assert not [word for page in pages for word in words_of(root, page)]


@pytest.mark.gate
def test_replaced_words_are_gone_from_docstrings_comments_and_messages(root):
    assert not [word for folder in ("src/rlvr", "docs/examples") for word in words_of(root, root / folder)]


@pytest.mark.parametrize(
    "text",
    [
        "the place and the mend",
        "SIGSEGV and its kin",
        "GRPO over the whole talk",
        "whose import registers the room's pieces",
        "the ground floor of the library",
        "draws that are owed",
        "the draws of an interrupted step are given back",
        "a warning\nsays so once",
    ],
)
def test_a_replaced_word_is_found(text):
    assert list(replaced_words("docs/page.md", 1, text))


@pytest.mark.parametrize(
    "text",
    [
        "the prompt must leave room for a response, and there is no room left",
        "torch.floor rounds down, and so does floor division",
        "memory that a GPU gives back to the driver",
        "bring recommended pieces_of_text, and amend kindly",
    ],
)
def test_another_meaning_is_not(text):
    assert not list(replaced_words("docs/page.md", 1, text))


def test_only_prose_is_read():
    assert prose_of_page("a `piece` [of](piece.md)\n```\npiece\n```\n").count("piece") == 0
    source = 'names = {"piece": 1}  # one word\nmessage = f"a component {piece} is `piece` here"\n'
    assert not [word for line, text in prose_of_code(source) for word in replaced_words("a.py", line, text)]


def test_every_other_meaning_is_needed(root, monkeypatch):
    """Without the list each of its words is found in its file."""
    listed = dict(OTHER_MEANINGS)
    monkeypatch.setattr(sys.modules[__name__], "OTHER_MEANINGS", {})
    for where, patterns in listed.items():
        result = {word.rpartition("(")[2] for word in words_of(root, root / where)}
        assert {f"now: {WORDS[pattern]})" for pattern in patterns} <= result, where


def test_replaced_names_are_gone(root):
    result = []
    for path in sorted((root / "src/rlvr").rglob("*.py")):
        place = path.relative_to(root / "src/rlvr").as_posix()
        allowed = set().union(*(names for folder, names in OF_ANOTHER_KIND.items() if place.startswith(folder)))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.NAME and token.string in REPLACED - allowed:
                result.append(f"{place}:{token.start[0]} {token.string}")
    assert not result


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
    assert not [term for term in terms if "," in term]


def test_docstrings_begin_with_a_verb_or_a_noun(root):
    """Those of attributes too; `Return what ...` is the same in other words."""
    opening = re.compile(r"\s*((Return|Tell|Say) )?(what|whether|where|how|who|which)\b", re.IGNORECASE)
    questions = []
    for path in sorted([*(root / "src/rlvr").rglob("*.py"), *(root / "docs/examples").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if opening.match(text):
                    questions.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not questions
