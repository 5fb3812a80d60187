"""Readings of a judge's reply: a label, a number in a range, a field of a JSON object, or the probability of a token.

Invariants: a reply that says two different things, or nothing that was asked for, has no reading, and no reading is
never a score of 0; with `coded` only a verdict with the code of its own request, or the letter that it draws, is read.
"""

from __future__ import annotations

import json
import math
import random
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvr.core.extras import install_command
from rlvr.errors import ConfigError
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.reply_cache import ChatReply
from rlvr.verifiers.label import last_label, read_labels

_REASONING = re.compile(r".*</(?:think|thinking|reasoning)>", re.DOTALL)
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
# `7`, `7/10`, `Score: 7`, `[[7]]`; not `between 6 and 7`.
_LAST_NUMBER = re.compile(rf"(?:[^\d\n]*[:=\s])?\W*?({_NUMBER})(?:\s*/\s*\d+)?\W*", re.ASCII)
TOP_LOGPROBS = 20
"""Alternatives that are asked for: the most that OpenAI's API gives."""


@dataclass(frozen=True)
class JudgeReading:
    """The content of a reply: its score, and the same as text."""

    score: float
    text: str
    parts: Mapping[str, float] = field(default_factory=dict)
    """Scores within it, by name."""


class VerdictReader(ABC):
    """Asks for a verdict in some form, and reads it."""

    worst: float
    """The least and the greatest score that it reads."""
    best: float

    @abstractmethod
    def instruction(self, code: str) -> str:
        """The last words of the request: the form of the verdict."""

    def request(self, code: str) -> dict[str, Any]:
        """Further fields of the request."""
        return {}

    @abstractmethod
    def read(self, reply: ChatReply) -> JudgeReading:
        """The verdict of a reply. JudgeError where it has none."""


@dataclass(frozen=True)
class LabelReader(VerdictReader):
    """One of a few labels, each with a score."""

    labels: Mapping[str, float]
    coded: bool = True

    def __post_init__(self) -> None:
        if any(isinstance(label, bool) for label in self.labels):
            raise ConfigError("judge: a label is true or false: put yes and no in quotes in YAML")
        known = read_labels({str(label): () for label in self.labels})
        if isinstance(known, str):
            raise ConfigError(f"judge: {known}")
        if not all(math.isfinite(score) for score in self.labels.values()):
            raise ConfigError("judge: the score of a label is not finite")

    @property
    def worst(self) -> float:  # type: ignore[override]
        return min(self.labels.values())

    @property
    def best(self) -> float:  # type: ignore[override]
        return max(self.labels.values())

    def instruction(self, code: str) -> str:
        return _line(code, self.coded, f"one of these words: {', '.join(self.labels)}")

    def read(self, reply: ChatReply) -> JudgeReading:
        if self.coded:
            said = _coded(reply)
            named = {label for label in self.labels if label.casefold() == said.casefold()}
            label = named.pop() if named else None
        else:
            label = last_label(after_reasoning(reply.text), {label: (label,) for label in self.labels})
        if label is None:
            raise unparsable(reply, "names no label, or several")
        return JudgeReading(float(self.labels[label]), label)


@dataclass(frozen=True)
class NumberReader(VerdictReader):
    """A number from `low` to `high`, as a score from 0 to 1."""

    low: float
    high: float
    coded: bool = True
    worst = 0.0
    best = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"judge: low={self.low} is not below high={self.high}")

    def instruction(self, code: str) -> str:
        return _line(code, self.coded, f"a number from {self.low:g} to {self.high:g}")

    def read(self, reply: ChatReply) -> JudgeReading:
        if self.coded:
            line = _coded(reply)
        else:
            lines = [line for line in after_reasoning(reply.text).splitlines() if any(c.isdigit() for c in line)]
            line = lines[-1] if lines else ""
        number = _LAST_NUMBER.fullmatch(line)
        if number is None:
            raise unparsable(reply, "has not one number in its last line with digits")
        return JudgeReading(scaled(float(number[1]), self.low, self.high), number[1])


@dataclass(frozen=True)
class JsonReader(VerdictReader):
    """A field of the last JSON object: a number from `low` to `high`, true or false, or one of the labels."""

    name: str
    low: float
    high: float
    labels: Mapping[str, float]
    schema: Mapping[str, Any] | None = None
    coded: bool = True
    worst = 0.0
    best = 1.0

    def __post_init__(self) -> None:
        NumberReader(self.low, self.high)
        if self.schema is not None and self.name not in self.schema.get("properties", {}):
            raise ConfigError(f"judge: the schema has no property {self.name!r}, the field that is read")
        if self.schema is not None:
            _validator(self.schema)

    def instruction(self, code: str) -> str:
        form = "that fits the schema" if self.schema is not None else f'with the key "{self.name}"'
        with_code = f', and the key "code" with the value "{code}"' if self.coded else ""
        return f"End your reply with one JSON object {form}{with_code}."

    def request(self, code: str) -> dict[str, Any]:
        if self.schema is None:
            return {}
        schema = dict(self.schema)
        if self.coded:
            schema["properties"] = {"code": {"type": "string"}, **schema["properties"]}
            schema["required"] = ["code", *schema.get("required", [])]
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}}

    def read(self, reply: ChatReply) -> JudgeReading:
        found = [row for row in json_objects(after_reasoning(reply.text)) if self.name in row]
        if self.coded:
            found = [row for row in found if row.get("code") == reply.code]
            # As JSON, in which NaN equals itself.
            if len({json.dumps(row[self.name], sort_keys=True) for row in found}) > 1:
                raise unparsable(reply, "has two different verdicts")
        if not found:
            raise unparsable(reply, f"has no JSON object with {self.name!r}{' and the code' if self.coded else ''}")
        row = found[-1]
        if self.schema is not None:
            shown = {key: value for key, value in row.items() if key != "code" or not self.coded}
            if (error := next(_validator(self.schema).iter_errors(shown), None)) is not None:
                raise unparsable(reply, f"does not fit the schema: {error.message[:200]}")
        value = row[self.name]
        if isinstance(value, bool):
            return JudgeReading(float(value), str(value).lower())
        if isinstance(value, (int, float)):
            return JudgeReading(scaled(float(value), self.low, self.high), f"{value}")
        if isinstance(value, str):
            for label, score in self.labels.items():
                if label.casefold() == value.strip().casefold():
                    return JudgeReading(float(score), label)
        raise unparsable(reply, f"has {value!r:.80} as {self.name!r}, neither a number nor a label")


@dataclass(frozen=True)
class ProbabilityReader(VerdictReader):
    """The mean score of the labels, weighted with the probability of each as the reply's first token.

    G-Eval (Liu et al. 2023, arXiv 2303.16634), equation 1, over the labels among the 20 likeliest tokens and divided by
    their sum. Fewer than `least` of the probability on labels is no reading. The reply is one token, so it has no room
    for a code: with `coded` each label is asked for by a letter that the code draws, which a response cannot know.
    """

    labels: Mapping[str, float]
    least: float = 0.5
    coded: bool = True

    def __post_init__(self) -> None:
        LabelReader(self.labels)
        if self.coded and 2 * len(self.labels) > len(self._letters):
            raise ConfigError(
                f"judge: read=probability has a letter for each label, and {len(self.labels)} labels are too many for "
                "that: set coded to false, which reads the labels themselves"
            )
        if not 0 < self.least <= 1:
            raise ConfigError(f"judge: least_mass={self.least} must be above 0 and at most 1")

    @property
    def worst(self) -> float:  # type: ignore[override]
        return min(self.labels.values())

    @property
    def best(self) -> float:  # type: ignore[override]
        return max(self.labels.values())

    @property
    def _letters(self) -> list[str]:
        """The letters that may stand for a label: none that is a word, or with which a label begins."""
        taken = {"A", "I", *(label[:1].upper() for label in self.labels)}
        return [letter for letter in string.ascii_uppercase if letter not in taken]

    def tokens(self, code: str) -> dict[str, str]:
        """Label -> the token that is asked for in its place in the request with this code."""
        if not self.coded:
            return {label: label for label in self.labels}
        drawn = random.Random(f"letters {code}").sample(self._letters, len(self.labels))
        return dict(zip(self.labels, drawn, strict=True))

    def instruction(self, code: str) -> str:
        if not self.coded:
            return f"Reply with one word only, without any other text: {' or '.join(self.labels)}."
        meant = ", ".join(f"{letter} for {label}" for label, letter in self.tokens(code).items())
        return f"Reply with one letter only, without any other text: {meant}."

    def request(self, code: str) -> dict[str, Any]:
        return {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}

    def read(self, reply: ChatReply) -> JudgeReading:
        mass = dict.fromkeys(self.labels, 0.0)
        tokens = self.tokens(reply.code)
        for token, logprob in reply.first_token.items():
            for label in self.labels:
                # ` Yes`, `yes` and `YES` are one label.
                if token.strip().casefold() == tokens[label].casefold():
                    mass[label] += math.exp(min(logprob, 0.0))
        total = sum(mass.values())
        if not reply.first_token:
            raise JudgeError("unparsable", "the endpoint gives no log-probs")
        if total < self.least:
            raise JudgeError("unparsable", f"the labels have {total:.3f} of the probability: {reply.text[:80]!r}")
        score = sum(self.labels[label] * value for label, value in mass.items()) / total
        return JudgeReading(score, max(mass, key=mass.__getitem__))


def scaled(value: float, low: float, high: float) -> float:
    """The value as a number from 0 at `low` to 1 at `high`. JudgeError out of that range."""
    if not low <= value <= high:
        raise JudgeError("out_of_range", f"the judge gives {value:g}, not a number from {low:g} to {high:g}")
    return (value - low) / (high - low)


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text that are in no other, in order."""
    decoder = json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            yield value
        place = text.find("{", end)


def _validator(schema: Mapping[str, Any]) -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError(f"judge: a schema needs jsonschema: {install_command('verifiers')}") from error
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"judge: the schema is invalid: {error.message}") from error
    return jsonschema.Draft202012Validator(schema)


def _line(code: str, coded: bool, what: str) -> str:
    if coded:
        return f"End your reply with one line that begins with `Verdict {code}:` and goes on with {what}."
    return f"End your reply with one line that has nothing but {what}."


def _coded(reply: ChatReply) -> str:
    """The text behind `Verdict CODE:`. JudgeError where that stands nowhere, or twice and differs."""
    pattern = re.compile(rf"^\W*verdict\W+{re.escape(reply.code)}\W*[:\uff1a](.*)$", re.IGNORECASE | re.MULTILINE)
    # A judge that thinks aloud may try a verdict before it decides.
    said = {line.strip(" \t*_`'\".\u3002") for line in pattern.findall(after_reasoning(reply.text))}
    if len(said) != 1:
        raise unparsable(reply, "has two different verdicts" if said else "has no line with the verdict and its code")
    return said.pop()


def after_reasoning(text: str) -> str:
    """The reply of a judge that thinks within tags without its thinking."""
    return _REASONING.sub("", text, count=1)


def unparsable(reply: ChatReply, what: str) -> JudgeError:
    """The error of a reply that cannot be read; `what` goes on after `the reply`."""
    cut_off = " (it was cut off: raise max_tokens)" if reply.truncated else ""
    return JudgeError("unparsable", f"the reply {what}{cut_off}: ...{reply.text[-200:]!r}")
