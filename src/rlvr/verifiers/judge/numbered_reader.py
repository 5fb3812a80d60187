"""A reading of many numbered things at once: a JSON object with one label for each criterion, or each step.

Invariant: a reply that leaves one out, or names one that is not there, has no reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.verifiers.judge.readings import JudgeReading, VerdictReader, after_reasoning, json_objects, unparsable
from rlvr.verifiers.judge.reply_cache import ChatReply


@dataclass(frozen=True)
class NumberedReader(VerdictReader):
    """A JSON object whose key `name` has a label for each number from 1 to `count`."""

    name: str
    count: int
    things: str
    """The things that are numbered, in words: `criteria`."""
    labels: Mapping[str, float]
    """Label, as JSON writes it -> score: `true`, or `"right"` without its quotes."""
    coded: bool = True

    @property
    def worst(self) -> float:  # type: ignore[override]
        return min(self.labels.values())

    @property
    def best(self) -> float:  # type: ignore[override]
        return max(self.labels.values())

    def instruction(self, code: str) -> str:
        words = [word if word in ("true", "false") else f'"{word}"' for word in self.labels]
        numbers = ", ".join(f'"{number}": {words[0]}' for number in range(1, min(self.count, 2) + 1))
        form = f"{{{numbers}{', ...' if self.count > 2 else ''}}}"
        key = f' and "code" the value "{code}"' if self.coded else ""
        return (
            f'End your reply with one JSON object in which "{self.name}" has the form {form}, with an entry for each '
            f"of the {self.count} {self.things}, which is {' or '.join(words)}{key}."
        )

    def read(self, reply: ChatReply) -> JudgeReading:
        found = [
            row[self.name] for row in json_objects(after_reasoning(reply.text)) if self._is_verdict(row, reply.code)
        ]
        if not found or any(one != found[0] for one in found):
            what = "has two different verdicts" if found else f"has no JSON object with {self.name!r}"
            raise unparsable(reply, what)
        if set(found[0]) != {str(number) for number in range(1, self.count + 1)}:
            numbers = ", ".join(sorted(found[0]))
            raise unparsable(reply, f"speaks of the {self.things} {numbers}, and there are {self.count}")
        parts = {}
        for number, value in found[0].items():
            said = value.strip().casefold() if isinstance(value, str) else json.dumps(value)
            # A label in quotes and a truth value are two things: "true" is a text.
            known = {word.casefold(): score for word, score in self.labels.items()}
            if said not in known or (said in ("true", "false")) != isinstance(value, bool):
                raise unparsable(reply, f"says {value!r:.80} of one of the {self.things}")
            parts[number] = known[said]
        return JudgeReading(sum(parts.values()) / self.count, json.dumps(found[0]), parts)

    def _is_verdict(self, row: Mapping[str, Any], code: str) -> bool:
        return isinstance(row.get(self.name), dict) and (not self.coded or row.get("code") == code)


def of_number(vote: JudgeReading | Exception, number: int) -> Any:
    """The part of a vote on one of the things; an error stays as it is."""
    return JudgeReading(vote.parts[str(number)], vote.text) if isinstance(vote, JudgeReading) else vote
