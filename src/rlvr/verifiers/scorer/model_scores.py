"""Scores of texts by a frozen model, loaded here or behind a server: what the verifier `scorer` makes verdicts of."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import numpy as np

from rlvr.core.daemon_calls import awaited_in_daemon
from rlvr.core.process.deadline import Deadline
from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.fenced_prompt import plain
from rlvr.verifiers.run_models import RunModels
from rlvr.verifiers.scorer.pooling_client import PoolingClient
from rlvr.verifiers.scorer.scored_texts import as_chat, filled, reference_of, without_tokens

if TYPE_CHECKING:
    from rlvr.policy.frozen_model import EncodedText, FrozenModel, Head, Pooling

T = TypeVar("T")
Kind = Literal["classifier", "embedding", "yes_no", "likelihood"]
Form = Literal["auto", "chat", "pair", "text"]
Activation = Literal["none", "sigmoid", "softmax"]

# Arbitrary: 65,536 embeddings of 1,024 numbers take half a GiB.
KEPT = 16384
"""References whose scores and embeddings are kept, those used last."""


@dataclass(frozen=True)
class ModelScore:
    """A model's score of one text, and further scores by name."""

    score: float
    named: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreOptions:
    """The options of a scorer that say what number of the model is its score."""

    kind: Kind
    form: Form
    template: str
    label: str | int | None
    activation: Activation
    labels: Mapping[str, float]
    least_mass: float
    pooling: Pooling
    of: Literal["reference", "response"]
    compared_with: str
    """The field of the task that is the reference: `reference`, or `demonstration`."""


class ModelScores(ABC):
    """Scores texts, each as the response to a task."""

    def __init__(self, options: ScoreOptions) -> None:
        self.options = options
        self.embedded: RecentValues[np.ndarray] = RecentValues()
        """Reference -> its embedding."""

    @abstractmethod
    async def score(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        """The score of each text."""

    def of_logits(self, logits: np.ndarray, names: Sequence[str] | None) -> ModelScore | JudgeError:
        """The score in the logits [C] of a classifier, whose outputs are called `names`, if that is known."""
        names = names or [str(number) for number in range(len(logits))]
        match self.options.activation:
            case "sigmoid":
                values = 1 / (1 + np.exp(-logits))
            case "softmax":
                values = np.exp(logits - logits.max())
                values = values / values.sum()
            case "none":
                values = logits
        place = chosen_output(self.options.label, names)
        if place is None:
            return JudgeError("unparsable", f"the model has the outputs {', '.join(names)}: set `label` to one of them")
        named = {} if len(names) == 1 else dict(zip(names, map(float, values), strict=True))
        return ModelScore(float(values[place]), named)


class RecentValues(Generic[T]):
    """The values of the keys that were used last."""

    def __init__(self) -> None:
        self._values: OrderedDict[object, T] = OrderedDict()

    def get(self, key: object) -> T | None:
        """The value of a key, or None."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: object, value: T) -> None:
        """Keep the value."""
        self._values[key] = value
        if len(self._values) > KEPT:
            self._values.popitem(last=False)


class LoadedScores(ModelScores):
    """Scores by a model in this process, computed on a daemon thread, one call at a time."""

    def __init__(self, options: ScoreOptions, model: FrozenModel) -> None:
        super().__init__(options)
        self.model = model
        self.tokens: list[int] = []
        """The token of each of `labels`."""
        if options.kind == "classifier" and chosen_output(options.label, model.labels) is None:
            names = ", ".join(model.labels)
            wrong = "several outputs" if options.label is None else f"no output {options.label!r}"
            raise ConfigError(f"scorer: models.{model.name} has {wrong}: set `label` to one of {names}")
        if options.kind == "yes_no":
            self.tokens = [self._token(label) for label in options.labels]
        if options.form == "chat" and not model.has_chat_template:
            raise ConfigError(f"scorer: form=chat, and the tokenizer of models.{model.name} has no chat template")

    async def score(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        return await awaited_in_daemon(lambda: self._score(task, texts), "verifier-scorer")

    def _score(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        with self.model.lock:
            special = [str(token) for token in self.model.tokenizer.all_special_tokens]
            texts = [without_tokens(text, special) for text in texts]
            match self.options.kind:
                case "classifier":
                    return self._classified(task, texts)
                case "embedding":
                    return self._similar(task, texts)
                case "yes_no":
                    return self._asked(task, texts)
                case "likelihood":
                    return self._likely(task, texts)

    def _classified(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        rows = [self._row(task, text) for text in texts]
        fitting = self._fitting(rows)
        logits = self.model.class_logits([rows[place] for place in fitting])
        found = {place: self.of_logits(one, self.model.labels) for place, one in zip(fitting, logits, strict=True)}
        return self._completed(rows, found)

    def _similar(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        reference = str(reference_of(task, self.options.compared_with))
        rows = [self.model.encoded(text) for text in texts]
        against = self.embedded.get(reference)
        if against is None:
            row = self.model.encoded(reference)
            if not self._fitting([row]):
                return [self._too_long(row, "the reference")] * len(texts)
            against = self.model.embeddings([row], self.options.pooling)[0]
            self.embedded.put(reference, against)
        fitting = self._fitting(rows)
        embeddings = self.model.embeddings([rows[place] for place in fitting], self.options.pooling)
        found = {place: cosine(one, against) for place, one in zip(fitting, embeddings, strict=True)}
        return self._completed(rows, found)

    def _asked(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        rows = [self._question(task, text) for text in texts]
        fitting = self._fitting(rows)
        kept = [rows[place] for place in fitting]
        log_probs = self.model.log_probs_at(kept, [[len(row.ids) - 1] for row in kept], self.tokens)
        found = {place: self._of_labels(one[0]) for place, one in zip(fitting, log_probs, strict=True)}
        return self._completed(rows, found)

    def _of_labels(self, log_probs: np.ndarray) -> ModelScore | JudgeError:
        mass = {label: math.exp(value) for label, value in zip(self.options.labels, log_probs, strict=True)}
        total = math.fsum(mass.values())
        if total < self.options.least_mass:
            return JudgeError("unparsable", f"the labels have {total:.3g} of the probability")
        score = math.fsum(self.options.labels[label] * value for label, value in mass.items()) / total
        return ModelScore(score, mass)

    def _likely(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        pairs = [self._continued(task, text) for text in texts]
        rows = [row for row, _ in pairs]
        fitting = self._fitting(rows)
        log_probs = self.model.token_log_probs([rows[n] for n in fitting], [pairs[n][1] for n in fitting])
        found: dict[int, ModelScore | JudgeError] = {}
        for place, values in zip(fitting, log_probs, strict=True):
            if len(values):
                found[place] = ModelScore(float(values.mean()), {"sum": float(values.sum()), "tokens": len(values)})
            else:
                found[place] = JudgeError("unparsable", "the text has no token, so that it has no mean log-prob")
        return self._completed(rows, found)

    # rows

    def _row(self, task: Task, text: str) -> EncodedText:
        """A response as the model is shown it, by the option `form`."""
        form = self.options.form
        if form == "auto":
            form = "text" if self.options.template else "chat" if self.model.has_chat_template else "pair"
        match form:
            case "chat":
                return self.model.encoded_chat(as_chat(task, text))
            case "pair":
                return self.model.encoded_pair(plain(task.prompt), text)
            case _:
                return self.model.encoded(filled(self.options.template or TEXT, task, {"response": text}))

    def _question(self, task: Task, text: str) -> EncodedText:
        """A question about a response, after which the model's next token is one of the labels."""
        shown = filled(self.options.template or QUESTION, task, {"response": text})
        if self.options.form in ("auto", "chat") and self.model.has_chat_template:
            return self.model.encoded_chat([{"role": "user", "content": shown}], opened=True)
        return self.model.encoded(shown)

    def _continued(self, task: Task, text: str) -> tuple[EncodedText, int]:
        """The row whose end is the text that is to be likely, and where that begins."""
        row = self._opened(task)
        target = text
        if self.options.of == "reference":
            before = filled(self.options.template or CONTINUED, task, {"response": text})
            row = [*row, *self.model.encoded(before, special=False).ids]
            target = str(reference_of(task, self.options.compared_with))
        # Tokenised alone, so that its tokens do not depend on what goes before.
        return self.model.row([*row, *self.model.encoded(target, special=False).ids]), len(row)

    def _opened(self, task: Task) -> list[int]:
        """The token ids of the prompt, after which the response begins."""
        if self.options.form in ("auto", "chat") and self.model.has_chat_template:
            return list(self.model.encoded_chat(as_chat(task, None), opened=True).ids)
        ids = list(self.model.encoded(plain(task.prompt)).ids)
        end = self.model.tokenizer.eos_token_id
        # What a tokenizer puts behind a text goes: the response follows.
        return ids[:-1] if len(ids) > 1 and ids[-1] == end else ids

    def _token(self, label: str) -> int:
        ids = self.model.encoded(label, special=False).ids
        if len(ids) != 1:
            raise ConfigError(
                f"scorer: the label {label!r} is {len(ids)} tokens of models.{self.model.name}: choose labels of one "
                "token each (a space before a word may be part of it)"
            )
        return int(ids[0])

    # lengths

    def _fitting(self, rows: Sequence[EncodedText]) -> list[int]:
        """The places of the rows that the model has positions for."""
        return [place for place, row in enumerate(rows) if 0 < len(row.ids) <= self.model.context]

    def _too_long(self, row: EncodedText, what: str) -> JudgeError:
        if not len(row.ids):
            return JudgeError("unparsable", f"{what} has no token")
        return JudgeError("too_long", f"{what} is {len(row.ids)} tokens long, and the model takes {self.model.context}")

    def _completed(
        self, rows: Sequence[EncodedText], found: Mapping[int, ModelScore | JudgeError]
    ) -> list[ModelScore | JudgeError]:
        return [
            found[place] if place in found else self._too_long(row, "what is shown") for place, row in enumerate(rows)
        ]


class ServedScores(ModelScores):
    """Scores by a model behind vLLM's server."""

    def __init__(self, options: ScoreOptions, client: PoolingClient, deadline: float) -> None:
        super().__init__(options)
        self.client = client
        self.deadline = deadline
        if options.kind not in ("classifier", "embedding"):
            raise ConfigError(
                f"scorer: kind={options.kind} needs a model with a `path`; a chat endpoint is asked by the verifier "
                "`judge` with read: probability"
            )
        if (problem := client.missing_key()) is not None:
            raise ConfigError(problem)

    async def score(self, task: Task, texts: Sequence[str]) -> list[ModelScore | JudgeError]:
        one = self._classified if self.options.kind == "classifier" else self._similar
        return list(await asyncio.gather(*(self._within(one, task, text) for text in texts)))

    async def _within(self, one: object, task: Task, text: str) -> ModelScore | JudgeError:
        assert callable(one)
        try:
            async with Deadline(self.deadline):
                result: ModelScore | JudgeError = await one(task, text)
                return result
        except JudgeError as error:
            return error
        except TimeoutError:
            return JudgeError("deadline", f"no score within {self.deadline:g} s")

    async def _classified(self, task: Task, text: str) -> ModelScore | JudgeError:
        form = self.options.form
        if form == "pair":
            logits = await self.client.scored(plain(task.prompt), text)
        elif form == "text" or (form == "auto" and self.options.template):
            logits = await self.client.classified(filled(self.options.template or TEXT, task, {"response": text}))
        else:
            logits = await self.client.classified(as_chat(task, text))
        return self.of_logits(np.asarray(logits), None)

    async def _similar(self, task: Task, text: str) -> ModelScore | JudgeError:
        reference = str(reference_of(task, self.options.compared_with))
        against = self.embedded.get(reference)
        if against is None:
            against = np.asarray(await self.client.embedded(reference))
            self.embedded.put(reference, against)
        return cosine(np.asarray(await self.client.embedded(text)), against)


TEXT = "{prompt}\n{response}"
"""The text for `form: text`."""
QUESTION = "{prompt}\n\n{response}\n\nIs the response above correct? Reply with yes or no."
"""The question of `kind: yes_no`."""
CONTINUED = "{response}\n"
"""The text between prompt and reference for `kind: likelihood`."""


def model_scores(
    options: ScoreOptions, models: RunModels, name: str, deadline: float, client: Mapping[str, object]
) -> ModelScores:
    """The scores by the model under `models.NAME`, loaded, or asked at its server with the options `client`.

    ConfigError where the model does not fit the options.
    """
    config = models.described(name)
    if config.urls:
        return ServedScores(options, PoolingClient.of(config, **client), deadline)
    heads: dict[Kind, Head] = {
        "classifier": "sequence",
        "embedding": "none",
        "yes_no": "causal",
        "likelihood": "causal",
    }
    return LoadedScores(options, models.loaded(name, heads[options.kind]))


def chosen_output(label: str | int | None, names: Sequence[str]) -> int | None:
    """The place of the output called `label`, or of that number; None where there is none, or several and no label."""
    if label is None:
        return 0 if len(names) == 1 else None
    if isinstance(label, str):
        return list(names).index(label) if label in names else None
    return label if 0 <= label < len(names) else None


def cosine(one: np.ndarray, other: np.ndarray) -> ModelScore | JudgeError:
    """The cosine of two embeddings [H]."""
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    if len(one) != len(other) or not size > 0:
        return JudgeError("unparsable", "an embedding is 0, or two are of different sizes")
    return ModelScore(float(one @ other) / size)
