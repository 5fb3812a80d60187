"""The choice of the program in a completion's text: an explicit policy, with one program or none.

1. The completion's own turn, after the last closed reasoning block (rlvr.verifiers.answers).
2. Of its fenced blocks (``` or ~~~) those that are marked with the task's language; where there is none, those without
   a mark. A block that is marked otherwise (`text`, `bash`, another language) shows something and is no program.
3. Of these the last, or as the option says, that defines the function which the task asks for; for a program that reads
   and prints, the last that looks like one (it has a way to print) rather than like the output of one. Where none does,
   the last.
4. In Python, before it those earlier ones that define functions, classes or imports which it uses and does not define
   itself.
5. Without any fenced block, the whole text.

A block that is never closed goes to the end of the text. A mark at the very end that closes nothing closes the block
that the prompt opened.

Invariants: time is linear in the text; the model's text is never parsed or compiled here; the only error is
NoProgramError.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from rlvr.verifiers.answers import after_reasoning, own_turn
from rlvr.verifiers.code.programs import has_function

Which = Literal["last", "first", "only"]

_NAMES = {
    "python": "python py pypy cpython",
    "c": "c gcc",
    "cpp": "cpp c++ cc cxx g++ gnu++",
    "javascript": "javascript js node nodejs node.js ecmascript es mjs cjs",
}
ALIASES = {name: language for language, names in _NAMES.items() for name in names.split()}
"""Names of a language in a fence or a task, without its version, and the runner's name of it."""

# Matches "```python", "  ~~~"; not "``" or a fence behind text. CommonMark 4.5, but with any indent, as in lists.
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})")
# The language of "```{.python .numberLines}" and "```c++ title=x" is `python` and `c++`.
_MARK = re.compile(r"[{.]*([\w+#.]*)")
# The end of `python3.11`, `c++17`, `cpp2a`.
_VERSION = re.compile(r"\d[\d.]*[a-z]?")
_PRINTS = {
    "python": re.compile(r"\b(?:print|write|writelines|exec)\b"),
    "c": re.compile(r"\bmain\b"),
    "cpp": re.compile(r"\bmain\b"),
    "javascript": re.compile(r"\b(?:console|stdout|print|writeSync|writeFileSync)\b"),
}
"""Words of which every program that prints has at least one, by language."""
_WORD = re.compile(r"\w+")
# `def f(x):`, `async def f():`, `class A(B):`, `from a import b as c`, at the start of a line; not `    def f(self):`,
# which `_ANYWHERE` also takes.
_AT_TOP = re.compile(r"^(?:async[ \t]+)?(def|class|import|from)[ \t]+([^\n]*)", re.MULTILINE)
_ANYWHERE = re.compile(r"^[ \t]*(?:async[ \t]+)?(def|class|import|from)[ \t]+([^\n]*)", re.MULTILINE)
# `x = 1`, and `x == 1` too, which makes a name count as defined that is not: a block less is added.
_ASSIGNED = re.compile(r"^[ \t]*(\w+)[ \t]*=", re.MULTILINE)
_DEEPER = 4
"""Columns by which a closing fence may not be deeper than the opening one (CommonMark 4.5)."""


def language_of(name: str) -> str | None:
    """The language that a mark or a task names, with its version (`python3.11`, `c++17`, `cpp2a`) or the name of a file
    (`main.py`); None for one that is unknown."""
    name = name.casefold().strip()
    version = next((match for match in _VERSION.finditer(name) if match.end() == len(name)), None)
    without_version = name[: version.start()] if version else name
    # In this order, since `node.js` is a name itself while `main.js` is a file.
    for candidate in (name, without_version, name.rpartition(".")[2]):
        if candidate in ALIASES:
            return ALIASES[candidate]
    return None


class NoProgramError(ValueError):
    """There is no program, or none that can be run; the text says why."""


class CodeBlock(NamedTuple):
    """A fenced block: the first word after its opening fence, in lower case, and its text."""

    mark: str
    text: str


def find_program(
    completion: str,
    language: str = "python",
    which: Which = "last",
    think_opened_by_prompt: bool = False,
    max_length: int = 100_000,
    wanted: str = "",
) -> str:
    """The program of a completion, as written. `wanted`: the function that it has to define, if any. NoProgramError
    says in words why there is none."""
    # Programs in the reasoning are drafts, and a later turn is one that the model made up.
    text = after_reasoning(own_turn(completion), think_opened_by_prompt)
    if text is None:
        raise NoProgramError("the reasoning never ended")
    # The mark of a file's encoding is none of its text.
    program = _chosen(text, language, which, wanted).removeprefix("\ufeff")
    if not program.strip():
        raise NoProgramError("there is no program")
    if len(program) > max_length:
        raise NoProgramError(f"the program has {len(program)} characters, over the limit of {max_length}")
    # `isascii` is a flag of the object, and spares the loop for nearly all programs.
    if not program.isascii() and any("\ud800" <= character <= "\udfff" for character in program):
        raise NoProgramError("the program holds a lone surrogate, which no file can")
    return program


def _chosen(text: str, language: str, which: Which, wanted: str) -> str:
    # An empty block without a mark shows nothing; an empty one with a mark is an empty program.
    blocks = [block for block in fenced_blocks(text) if block.text.strip() or block.mark]
    if not blocks:
        return text.strip("\r\n")
    marked = [block.text for block in blocks if block.mark and language_of(block.mark) == language]
    unmarked = [block.text for block in blocks if not block.mark]
    # Marked blocks that are all empty give way to unmarked ones.
    if any(map(str.strip, marked)) or not unmarked:
        programs = marked
    else:
        programs = unmarked
    if not programs:
        marks = ", ".join(dict.fromkeys(block.mark for block in blocks))
        raise NoProgramError(f"no fenced block is marked {language} or unmarked (marked: {marks[:80]})")
    if which == "only":
        if len(programs) > 1:
            raise NoProgramError(f"{len(programs)} fenced blocks where one is asked for")
        return programs[0]
    fitting = [one for one in programs if _fits(one, language, wanted)]
    # The function may stand in an unmarked block beside a marked example.
    if wanted and not fitting:
        fitting = [one for one in unmarked if _fits(one, language, wanted)]
    chosen = (fitting or programs)[0 if which == "first" else -1]
    if language == "python":
        return _with_earlier(chosen, programs, wanted)
    return chosen


def _with_earlier(chosen: str, programs: list[str], wanted: str) -> str:
    """A program with the blocks before it that define functions, classes or imports which it uses and does not define
    itself."""
    at = next((at for at, one in enumerate(programs) if one is chosen), 0)
    parts = [chosen]
    own = _defined(chosen, _ANYWHERE) | set(_ASSIGNED.findall(chosen))
    used = set(_WORD.findall(chosen))
    # From the nearest backwards: a name that a later block defines hides an earlier one.
    for earlier in reversed(programs[:at]):
        definitions = _defined(earlier, _AT_TOP)
        # A block that defines the wanted function is an earlier version of the answer, and is no helper by that name.
        if (definitions - own - {wanted}) & used:
            parts.append(earlier)
            own |= definitions
            used |= set(_WORD.findall(earlier))
    return "\n".join(reversed(parts))


def _defined(program: str, where: re.Pattern[str]) -> set[str]:
    """The names of functions, classes and imports of a Python program, by its lines."""
    found = set()
    for definition in where.finditer(program):
        kind = definition[1]
        rest = definition[2]
        if kind in ("def", "class"):
            found |= set(_WORD.findall(rest)[:1])
        else:
            if kind == "from":
                names = rest.partition(" import ")[2]
            else:
                names = rest
            # The last word of `a as b` is the name that is bound.
            found |= {words[-1] for part in names.split(",") if (words := _WORD.findall(part))}
    return found


def _fits(program: str, language: str, wanted: str) -> bool:
    """Return True if a block has the wanted function or, if none is wanted, may be a program that prints."""
    if wanted:
        return has_function(program, wanted)
    return _PRINTS[language].search(program) is not None


class _Fence(NamedTuple):
    indent: str
    mark: str
    info: str


def _fence(line: str) -> _Fence | None:
    match = _FENCE.match(line)
    if match is None:
        return None
    info = line[match.end() :].strip()
    # "``` `x` ```" is inline code, not a fence (CommonMark 4.5).
    if "`" in info and match[1][0] == "`":
        return None
    return _Fence(line[: match.start(1)], match[1], info)


def fenced_blocks(text: str) -> list[CodeBlock]:
    """The fenced blocks of a text in order; what an indented fence holds loses that indent."""
    blocks: list[CodeBlock] = []
    lines: list[str] = []
    opened: _Fence | None = None
    before: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = _fence(line)
        if opened is None:
            if fence:
                opened = fence
                lines = []
            # Kept for a completion whose prompt opened the block: the text before the first fence is then the program.
            elif not blocks:
                before.append(line)
        elif fence and _closes(fence, opened):
            blocks.append(_block(opened, lines))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        rest = _block(opened, lines)
        if rest.text.strip() or rest.mark:
            blocks.append(rest)
        elif not blocks:
            blocks.append(CodeBlock("", "".join(before)))
    return blocks


def _closes(fence: _Fence, opened: _Fence) -> bool:
    same = fence.mark[0] == opened.mark[0] and len(fence.mark) >= len(opened.mark)
    return same and not fence.info and len(fence.indent) < len(opened.indent) + _DEEPER


def _block(opened: _Fence, lines: list[str]) -> CodeBlock:
    # A block within a list is indented as a whole.
    body = [line.removeprefix(opened.indent) for line in lines]
    mark = _MARK.match(opened.info)
    return CodeBlock(mark[1].casefold() if mark else "", "".join(body))
