"""The answer is the gold text, letter by letter, up to what the options ignore."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from rlvr.records import Task, Verdict
from rlvr.registry import register_verifier
from rlvr.verifiers.answers import AnswerVerifier, read_texts
from rlvr.verifiers.extraction import Fallback, Method


@register_verifier("exact")
@dataclass
class ExactVerifier(AnswerVerifier):
    """The answer equals `task.answer`, or one of them where it is a list. By default it is all of the text after the
    reasoning block, and only the space around it does not matter.
    """

    methods: tuple[Method, ...] = ()
    """Where to look for the answer before the fallback: `boxed`, `hash` (`#### 72`), `tag` (`<answer>`), `phrase`."""
    fallback: Fallback = "whole"
    """When none of the methods finds anything: `none`, the `last_formula`, the `last_number`, or the `whole` text after the
    reasoning."""
    max_length: int = 100_000
    """Characters of an answer; a longer one is unparsable."""
    casefold: bool = False
    """Ignore case."""
    ignore_space: bool = False
    """Any run of white space is one space."""
    ignore_punctuation: bool = False
    """Leave out punctuation (Unicode categories P)."""
    unicode: bool = False
    """Compare after NFKC normalisation: full-width letters, ligatures and composed accents do not matter."""

    def check_task(self, task: Task) -> str | None:
        golds = read_texts(task.answer)
        if isinstance(golds, str):
            return golds
        emptied = [gold for gold in golds if not self._key(gold)]
        return f"nothing is left of the answer {emptied[0]!r} after normalisation" if emptied else None

    def judge(self, task: Task, answer: str) -> Verdict:
        return Verdict.from_score(
            any(self.same_answer(answer, gold) for gold in read_texts(task.answer)), answer=answer
        )

    def same_answer(self, first: str, second: str) -> bool:
        return self._key(first) == self._key(second)

    def _key(self, text: str) -> str:
        """What two equal answers share."""
        if self.unicode:
            text = unicodedata.normalize("NFKC", text)
        if self.casefold:
            text = text.casefold()
        if self.ignore_punctuation:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split()) if self.ignore_space else text.strip()
