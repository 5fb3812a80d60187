"""The verifier `step_scorer`: a process reward model scores each step of a response.

Two forms of public models. A head with outputs at each token, read at the separator after a step: Qwen2.5-Math-PRM
(Zhang et al. 2025, arXiv 2501.07301; its model card inserts `<extra_0>` after each step and takes the probability of
label 1 there) and those of TRL's PRMTrainer (labels at the last token of a step and its separator). The probability of
a token after each step: Math-Shepherd (Wang et al. 2024, arXiv 2312.08935; the card of
peiyi9979/math-shepherd-mistral-7b-prm has the softmax over `+` and `-` after the tag `\u043a\u0438`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlvr.core.daemon_calls import awaited_in_daemon
from rlvr.core.splitters import Span, Split
from rlvr.errors import ConfigError
from rlvr.records import Task, Verdict, VerdictStatus
from rlvr.registry import register_verifier
from rlvr.verifiers.base import Needs, Verifier
from rlvr.verifiers.judge.chat_client import JudgeError
from rlvr.verifiers.judge.undecided_counts import UndecidedCounts
from rlvr.verifiers.run_models import RunModels
from rlvr.verifiers.scored_steps import fused_scores, splitter_of_text
from rlvr.verifiers.scorer.model_scores import chosen_output
from rlvr.verifiers.scorer.scored_texts import as_chat, check_template, filled, missing_field, without_tokens

if TYPE_CHECKING:
    from rlvr.policy.frozen_model import EncodedText, FrozenModel

StepHead = Literal["token", "own", "next_token"]
HEADS: dict[StepHead, Literal["token", "none", "causal"]] = {"token": "token", "own": "none", "next_token": "causal"}
"""The head -> what is loaded (rlvr.policy.frozen_model.Head)."""
Fused = Literal["min", "mean", "product", "last", "before_error"]
# Arbitrary, and above what a response of 32,768 tokens has by paragraphs; a model reads further ones as the last.
MOST_STEPS = 500
"""Most steps of a response."""


@dataclass(frozen=True)
class _Row:
    """One order of the steps of one response, as the model is shown it."""

    response: int
    encoded: EncodedText
    places: Sequence[int]
    """The token at which each step is scored, in the order of the response."""


@register_verifier("step_scorer")
@dataclass
class StepScorerVerifier(Verifier):
    """The steps of a response, each with the score that a process reward model of the section `models` gives it.

    `Verdict.spans` has each step's characters and score, which the advantage `spans` and the term `verdict_spans` turn
    into credit of its tokens; `Verdict.scores` has `min`, `mean`, `product`, `last`, `before_error`, the share of steps
    before the first that scores less than `threshold`, and `steps`, their number. The responses of a group are scored
    together, on rank 0. What keeps the model from a score leaves the response undecided; a response without any text
    scores 0.

    Qwen2.5-Math-PRM: `{model: NAME, head: own, separator: "<extra_0>"}` with `models.NAME.trust_remote_code`.
    Math-Shepherd: `{head: next_token, labels: {"+": 1, "-": 0}, separator: " \u043a\u0438\\n", template: "{prompt}
    {response}"}`.
    """

    model: str
    """The model's name in `models`, with a `path` to load it from."""
    head: StepHead = "token"
    """token: the output of a token classifier (`AutoModelForTokenClassification`) at the separator after a step; own:
    that of a model whose own code has such a head (`AutoModel`); next_token: the probability of a token after the
    separator."""
    split: Split = "blank_line"
    """The border of two steps: `blank_line`, `line`, `sentence`, a regular expression that matches what
    stands between two, or a list of texts with which steps begin."""
    separator: str = "\n\n"
    """The text after each step. The score is read at the last token of what of it is no space, or at its last token."""
    form: Literal["auto", "chat", "text"] = "auto"
    """The form in which a response is shown. chat: the prompt and the steps by the chat template of the model's
    tokenizer; text: `template`; auto: chat where there is a chat template and no `template`."""
    template: str = ""
    """Text with `{response}` (the steps, each with a separator), `{prompt}` and fields of the task; empty: the prompt,
    a line break and the response."""
    label: str | int | None = None
    """The output that is the score, by name or number; null: the second of two, or the only one."""
    against: str | int | None = None
    """Another output, by name or number: the score is the label's share of the probability of the two, which is at
    least 0.5 where the label is the more probable one. Null: its share of all outputs."""
    labels: dict[str, float] = field(default_factory=lambda: {"+": 1.0, "-": 0.0})
    """Tokens of `next_token` -> score: the mean score, weighted with their probabilities."""
    order: Literal["l2r", "r2l", "both"] = "l2r"
    """l2r: steps in their order, each judged after those before it; r2l: in the reverse order, each after those that
    follow it; both: the mean of the two (BiPRM, Zhang et al. 2025, arXiv 2508.01682; from its abstract)."""
    score: Fused = "min"
    """The verdict's own score, of those above."""
    threshold: float = 0.5
    """A step with a lower score is an error, for `before_error`."""
    deadline: float = 300.0
    """Seconds for the responses of a group, with the wait for others before it."""

    needs = Needs(remote=True)
    gives_spans = True

    def __post_init__(self) -> None:
        self._splitter = splitter_of_text("step_scorer", self.split, MOST_STEPS)
        if not self.separator:
            raise ConfigError("step_scorer: separator is empty: the score of a step is read at a token after it")
        if not self.labels or not all(math.isfinite(score) for score in self.labels.values()):
            raise ConfigError("step_scorer: labels are tokens with finite scores, at least one")
        if self.template:
            check_template("step_scorer", self.template)
        if self.form == "chat" and self.template:
            raise ConfigError("step_scorer: form=chat shows the chat alone: leave template out, or set form to text")
        self.time_limit = self.deadline + 10.0
        self._loaded: FrozenModel | None = None
        self._tokens: list[int] = []
        self._output = 0
        self._other: int | None = None
        self._undecided = UndecidedCounts()
        self._scored = 0
        self._seconds = 0.0

    def attach(self, models: RunModels) -> None:
        """Load the model. ConfigError where it does not fit the options."""
        model = models.loaded(self.model, HEADS[self.head])
        where = f"step_scorer: models.{self.model}"
        if not model.tokenizer.is_fast:
            raise ConfigError(f"{where} has a tokenizer that does not tell the characters of tokens: use a fast one")
        if self.form == "chat" and not model.has_chat_template:
            raise ConfigError(f"{where} has a tokenizer without a chat template, and form is chat")
        if self.head == "next_token":
            self._tokens = [self._token(model, label) for label in self.labels]
        else:
            names = model.labels
            place = 1 if self.label is None and len(names) == 2 else chosen_output(self.label, names)
            if place is None:
                raise ConfigError(f"{where} has the outputs {', '.join(names)}: set `label` to one of them")
            self._output = place
            self._other = None if self.against is None else self._contrast(names, where)
        self._loaded = model

    def _contrast(self, names: Sequence[str], where: str) -> int:
        """The output that `against` names."""
        place = chosen_output(self.against, names)
        if place is None or place == self._output:
            raise ConfigError(f"{where} has the outputs {', '.join(names)}: set `against` to one that is not `label`")
        return place

    def _token(self, model: FrozenModel, label: str) -> int:
        ids = model.encoded(label, special=False).ids
        if len(ids) != 1:
            raise ConfigError(f"step_scorer: the label {label!r} is {len(ids)} tokens of models.{self.model}, not one")
        return int(ids[0])

    def check_task(self, task: Task) -> str | None:
        return missing_field(self.template, task)

    async def verify(self, task: Task, completion: str) -> Verdict:
        return (await self.verify_group(task, [completion]))[0]

    async def verify_group(self, task: Task, completions: Sequence[str]) -> list[Verdict]:  # type: ignore[override]
        """The verdicts on the responses of a group, in their order."""
        model = self._loaded
        if model is None:
            raise ConfigError(f"step_scorer: models.{self.model} was not loaded: call `attach` with a run's models")
        start = time.perf_counter()
        steps = [self._splitter.of_text(one) for one in completions]
        scores = await awaited_in_daemon(lambda: self._scores(model, task, completions, steps), "verifier-step-scorer")
        self._scored += len(completions)
        self._seconds += time.perf_counter() - start
        return [self._verdict(spans, values) for spans, values in zip(steps, scores, strict=True)]

    def metrics(self) -> dict[str, float]:
        scored, self._scored = self._scored, 0
        seconds, self._seconds = self._seconds, 0.0
        return {"scored": float(scored), "seconds": seconds, **self._undecided.take()}

    def _scores(
        self, model: FrozenModel, task: Task, completions: Sequence[str], steps: Sequence[list[Span]]
    ) -> list[np.ndarray | JudgeError]:
        """The scores of the steps of each response, float64 [steps]."""
        with model.lock:
            special = [str(token) for token in model.tokenizer.all_special_tokens]
            rows: list[_Row] = []
            result: list[np.ndarray | JudgeError] = [np.empty(0)] * len(completions)
            for number, (text, spans) in enumerate(zip(completions, steps, strict=True)):
                parts = [without_tokens(text[a:b], [*special, self.separator.strip()]) for a, b in spans]
                shown = [self._row(model, task, number, parts, reverse) for reverse in self._reversed if parts]
                failed = next((one for one in shown if isinstance(one, JudgeError)), None)
                if failed is not None:
                    result[number] = failed
                else:
                    rows += [one for one in shown if isinstance(one, _Row)]
            of_rows: dict[int, list[np.ndarray]] = {}
            for row, values in zip(rows, self._read(model, rows), strict=True):
                of_rows.setdefault(row.response, []).append(values)
        for number, orders in of_rows.items():
            result[number] = np.mean(orders, axis=0)
        return result

    @property
    def _reversed(self) -> tuple[bool, ...]:
        return {"l2r": (False,), "r2l": (True,), "both": (False, True)}[self.order]

    def _row(
        self, model: FrozenModel, task: Task, number: int, parts: Sequence[str], reverse: bool
    ) -> _Row | JudgeError:
        """A response as the model is shown it, and where its steps are scored."""
        order = list(range(len(parts)))[:: -1 if reverse else 1]
        content = ""
        read: dict[int, int] = {}
        # The character of a separator at which its step is scored.
        at = len(self.separator.rstrip()) or len(self.separator)
        for step in order:
            content += parts[step] + self.separator
            read[step] = len(content) - len(self.separator) + at - 1
        # A template may strip what it is given.
        bare = content.rstrip()
        if self.form == "chat" or (self.form == "auto" and not self.template and model.has_chat_template):
            shown = model.tokenizer.apply_chat_template(as_chat(task, content), tokenize=False)
            encoding = model.tokenizer(shown, add_special_tokens=False, return_offsets_mapping=True)
        else:
            shown = filled(self.template or "{prompt}\n{response}", task, {"response": content})
            encoding = model.tokenizer(shown, return_offsets_mapping=True)
        start = shown.rfind(bare)
        if start < 0:
            return JudgeError("unparsable", "the chat template of the model changes the text of a response")
        if len(encoding["input_ids"]) > model.context:
            return JudgeError("too_long", f"{len(encoding['input_ids'])} tokens, and the model takes {model.context}")
        # Where the end of the last separator was stripped, the last character that is there.
        read = {step: min(start + place, len(shown) - 1) for step, place in read.items()}
        ends = np.asarray([end for _, end in encoding["offset_mapping"]])
        # The first token that ends after the character; special tokens of no characters end at 0.
        places = [int(np.flatnonzero(np.maximum.accumulate(ends) > read[step])[0]) for step in range(len(parts))]
        return _Row(number, model.row(encoding["input_ids"]), places)

    def _read(self, model: FrozenModel, rows: Sequence[_Row]) -> list[np.ndarray]:
        """The scores of the steps of each row, float64 [steps]."""
        encoded = [row.encoded for row in rows]
        if self.head == "next_token":
            worth = np.asarray(list(self.labels.values()))
            mass = [np.exp(one) for one in model.log_probs_at(encoded, [row.places for row in rows], self._tokens)]
            return [(one @ worth) / one.sum(axis=1) for one in mass]
        logits = [of_row[list(row.places)] for of_row, row in zip(model.token_logits(encoded), rows, strict=True)]
        if self._other is not None:
            return [1 / (1 + np.exp(one[:, self._other] - one[:, self._output])) for one in logits]
        if len(model.labels) == 1:
            return [1 / (1 + np.exp(-one[:, 0])) for one in logits]
        shares = [np.exp(one - one.max(axis=1, keepdims=True)) for one in logits]
        return [(one / one.sum(axis=1, keepdims=True))[:, self._output] for one in shares]

    def _verdict(self, spans: Sequence[Span], scores: np.ndarray | JudgeError) -> Verdict:
        if isinstance(scores, np.ndarray) and not np.isfinite(scores).all():
            scores = JudgeError("out_of_range", "the model gives no number for a step")
        if isinstance(scores, JudgeError):
            return self._undecided.verdict(scores)
        if not spans:
            return Verdict(VerdictStatus.UNPARSABLE, 0.0, reason="the response has no step")
        values = scores.tolist()
        fused = fused_scores(values, [value < self.threshold for value in values])
        fused["product"] = math.prod(values)
        return Verdict.from_score(
            fused[self.score],
            reason=f"{len(values)} steps; {self.score} {fused[self.score]:.4g}",
            scores=fused,
            spans=[(start, end, value) for (start, end), value in zip(spans, values, strict=True)],
        )
