"""Does the whole completion follow a template such as `<think>{think}</think><answer>{answer}</answer>`?

Invariants: each tag of the template stands in the completion exactly as often as in the template, and in its order, so
no second answer and no faked turn fits into a slot. What nobody sees (zero-width characters, `&nbsp;`) fills no slot
and hides no tag. Linear in the completion.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Verifier
from rlvr.verifiers.invisible import visible

# Matches `{think}`; not `{}`, `{1}`.
_SLOT = re.compile(r"\{([A-Za-z_]\w*)\}")
# Matches `<think>`, `Final answer:`; not `a<b`.
_PIECE = re.compile(r"<[^<>]*>|[^<>\s]+(?:[ \t]+[^<>\s]+)*|[<>]")
# Matches `<think>`, `< / Think >`; not `<1>`. Variants of a tag in another case or spacing, which would be read as the
# tag by a human.
_NAME = re.compile(r"<[\s/]*([A-Za-z_][\w-]*)[\s/]*>")
# Matches `<|im_start|>`, `[INST]`, `</s>`; not `<s_1>`.
_ROLE = re.compile(r"<\|[^\s|<>]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|</?s>")


@register_verifier("format")
@dataclass
class FormatVerifier(Verifier):
    """The completion follows a template: every tag exactly once, in order, every slot filled, nothing else around.

    It looks at the whole completion, reasoning included. The verdict's answer is the content of the slot `answer`.
    """

    template: str = "<think>{think}</think><answer>{answer}</answer>"
    """Tags or other fixed texts, and slots in braces. White space between them does not matter. A slot holds any text
    but a tag of the template, in whatever case or spacing, and no role token (`<|im_start|>`) that the template does
    not have."""
    prompt_wrote: str = ""
    """The beginning of the template that the prompt has written already (`<think>`), and the completion does not
    repeat."""
    credit: Literal["all", "tags"] = "all"
    """All or nothing; or the share of tags that stand there exactly once, where the layout around them counts as one
    tag."""

    def __post_init__(self) -> None:
        pieces = _pieces(self.template)
        if not any(not _is_slot(piece) for piece in pieces):
            raise ConfigError(f"format: the template {self.template!r} has no tag")
        if any(_is_slot(one) and _is_slot(next_) for one, next_ in itertools.pairwise(pieces)):
            raise ConfigError(f"format: two slots of the template {self.template!r} have no tag between them")
        names = [piece for piece in pieces if _is_slot(piece)]
        if len(set(names)) < len(names):
            raise ConfigError(f"format: a slot of the template {self.template!r} has two places")
        opened = _pieces(self.prompt_wrote)
        if tuple(opened) != tuple(pieces[: len(opened)]):
            raise ConfigError(f"format: prompt_wrote={self.prompt_wrote!r} is not the beginning of {self.template!r}")

    def quick(self, task: Task, completion: str) -> Verdict:
        completion = visible(completion)
        slots = self._slots(self.prompt_wrote + completion)
        if isinstance(slots, dict):
            return Verdict.from_score(1.0, answer=slots.get("answer"))
        if self.credit == "all":
            return Verdict(VerdictStatus.WRONG, 0.0, reason=slots)
        tags = self._tags
        counts = self._tag_counts(completion)
        written = Counter(piece for piece in _pieces(self.prompt_wrote) if not _is_slot(piece))
        # Tags that the prompt wrote earn nothing.
        wanted = {tag: count - written[tag] for tag, count in tags.items() if count > written[tag]}
        right = sum(counts[tag] == count for tag, count in wanted.items())
        # One more share for the layout, which is wrong here: the template was not followed as a whole.
        return Verdict.from_score(right / (len(wanted) + 1), reason=slots)

    def verify(self, task: Task, completion: str) -> Verdict:
        return self.quick(task, completion)

    @property
    def _tags(self) -> Counter[str]:
        return Counter(piece for piece in _pieces(self.template) if not _is_slot(piece))

    def _tag_counts(self, text: str) -> Counter[str]:
        """Return the number of occurrences of each tag; a tag that is part of a longer one is counted where the longer
        one is not."""
        return Counter(match[0] for match in _any_of(tuple(self._tags)).finditer(text))

    def _slots(self, text: str) -> dict[str, str] | str:
        """The content of the slots, stripped; else in words why the text does not follow the template."""
        tags = self._tags
        counts = self._tag_counts(text)
        for tag, count in tags.items():
            if counts[tag] != count:
                return f"{tag} stands there {counts[tag]} times, not {count}"
        names = {name[1].casefold() for tag in tags if (name := _NAME.fullmatch(tag))}
        alike = sum(match[1].casefold() in names for match in _NAME.finditer(text))
        if alike != sum(count for tag, count in tags.items() if _NAME.fullmatch(tag)):
            return "a variant of a tag stands in the text"
        if any(not any(match[0] in tag for tag in tags) for match in _ROLE.finditer(text)):
            return "a role token stands in the text"
        return self._fill(text)

    def _fill(self, text: str) -> dict[str, str] | str:
        """Go through text and template together, once."""
        slots: dict[str, str] = {}
        matches = _any_of(tuple(self._tags)).finditer(text)
        end = 0
        slot = ""
        for piece in (*_pieces(self.template), None):
            if piece is not None and _is_slot(piece):
                slot = piece[1:-1]
                continue
            match = next(matches, None)
            if piece is not None and (match is None or match[0] != piece):
                return f"{piece} is out of order"
            between = text[end : match.start() if match else len(text)].strip()
            if slot and not between:
                return f"{slot} is empty"
            if between and not slot:
                return "there is text outside of the slots"
            if slot:
                slots[slot] = between
            end = match.end() if match else len(text)
            slot = ""
        return slots


def _is_slot(piece: str) -> bool:
    return _SLOT.fullmatch(piece) is not None


@functools.lru_cache(maxsize=64)
def _pieces(template: str) -> tuple[str, ...]:
    """The template as tags, other fixed texts, and slots with their braces."""
    pieces: list[str] = []
    for index, part in enumerate(_SLOT.split(template)):
        pieces += [f"{{{part}}}"] if index % 2 else _PIECE.findall(part)
    return tuple(pieces)


@functools.lru_cache(maxsize=64)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    # The longest first: an alternation takes the first that matches, and one tag may begin another.
    return re.compile("|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)))
