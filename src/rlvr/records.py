"""Records of the library: Task, Rollout, Verdict, Group and Batch.

Invariants:
- Token in, token out: `Rollout.token_ids` are the ids that were sampled and the ids that are trained; text is decoded
  for verifiers only and never tokenised again.
- Every per-token field of a rollout has one entry per token, prompt included. Unknown behaviour log-probs are NaN.
- An undecided verdict has score None (NaN in columns), never 0.
- Nothing here needs torch; columns are numpy arrays.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvr.errors import nearest, user_traceback

Messages = list[dict[str, Any]]

BASELINE = "baseline"
"""The role of a rollout that others are compared with and that does not train."""

USUAL_ROLES = frozenset({"policy", "demonstrator", BASELINE})
"""Roles of responses to the run's own tasks. A plan gives the rollouts of tasks that it makes a role of their own."""

UPDATED = "logprobs/updated"
"""The token column of the log-probs under the weights that were updated, for a look at the ratio to
`behaviour_logprobs`."""


class Origin(enum.IntEnum):
    """The author of a token."""

    PROMPT = 0
    POLICY = 1
    HINT = 2
    TOOL = 3
    """A tool or an environment."""
    DEMONSTRATION = 5


_POLICY = np.int8(Origin.POLICY)
"""Comparing an array with a plain number takes half the time of comparing it with a member of an enum."""


class StopReason(enum.StrEnum):
    """Why a rollout ended."""

    END = "end"
    """The policy sampled an end-of-sequence or stop token."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    """`max_new_tokens` were sampled: the completion is truncated."""
    CONTEXT = "context"
    """The model's context was full: the completion is truncated."""
    ABORTED = "aborted"
    GIVEN = "given"
    """Not sampled: a demonstration or a recorded answer."""

    @property
    def truncated(self) -> bool:
        return self in (StopReason.LENGTH, StopReason.CONTEXT, StopReason.ABORTED)


class VerdictStatus(enum.StrEnum):
    """The outcome of a verification."""

    CORRECT = "correct"
    WRONG = "wrong"
    PARTIAL = "partial"
    UNPARSABLE = "unparsable"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class Task:
    """A prompt and what is needed to check an answer to it.

    `prompt` is a string, used verbatim, or chat messages, which go through the chat template. `answer` may be absent.
    `demonstration` is a worked response, for SFT or mixing. `info` holds whatever the verifier needs (tests, options).
    """

    id: str
    prompt: str | Messages
    answer: Any = None
    demonstration: str | None = None
    verifier: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    place: str = field(default="", compare=False, repr=False)
    """The file and line or row, or the data set and row, that the task was read from; for errors, and not recorded."""

    @property
    def named(self) -> str:
        """The task in an error: where it was read from, and its id."""
        return ", ".join(filter(None, [self.place, f"task {self.id!r}"]))

    def to_json(self) -> dict[str, Any]:
        row = vars(self) | {"info": dict(self.info)}
        del row["place"]
        return row


LONGEST_REASON = 4096
"""Characters kept of a verdict's reason and of its traceback: every rollout keeps them, and a megabyte each fills a
disk."""


def printable(text: str) -> str:
    """The text with an escape (`\\n`, `\\x1b`, `\\ud800`) for each character that would move a terminal, end a line or
    fit no file."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def cut(text: str, limit: int = LONGEST_REASON) -> str:
    """`text` in at most `limit` characters: its first and last parts, and the number of those that were left out."""
    if len(text) <= limit:
        return text
    mark = f" [... {len(text) - limit} characters are left out ...] "
    head = limit // 2
    return text[: head - len(mark)] + mark + text[head - limit :]


@dataclass(frozen=True)
class Verdict:
    """The judgement of a verifier about one completion.

    `score` is None when undecided: what the answer causes is decided (an unparsable answer, or a limit that the answer
    itself spent, scores 0); what we cause (bad gold, a killed worker, a remote service down) is undecided, left out of
    loss and baseline, and counted. `scores` are named further scores; `spans` are (first character, past-the-end
    character, score) over the completion's text. `reason` and `traceback` are cut where the verdict is made, so that
    nothing longer crosses from a worker process or is kept; what cannot be printed in one line of a `reason` is written
    as an escape.
    """

    status: VerdictStatus
    score: float | None
    reason: str = ""
    answer: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    spans: Sequence[tuple[int, int, float]] = ()
    seconds: float = 0.0
    traceback: str = ""
    """That of the exception which kept the verifier from a score; of a result that is no score, the reason again."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Of a verifier that is made of verifiers: the traceback of each part that judged and may decide, "" of one that
    did not raise, by the name of the part (`part/inner` for a part within a part)."""

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"a verdict's score must be finite or None, not {self.score}")
        # The dataclass is frozen; this is its own constructor.
        if isinstance(self.reason, str):
            # Cut before `printable`, which goes through all of the text, since a reason may be megabytes; and again,
            # since an escape such as `\x1b` is four characters in place of one.
            object.__setattr__(self, "reason", cut(printable(cut(self.reason))))
        if isinstance(self.traceback, str):
            object.__setattr__(self, "traceback", cut(self.traceback))

    @property
    def decided(self) -> bool:
        return self.score is not None

    @classmethod
    def from_score(cls, score: float | bool | None, **more: Any) -> Verdict:
        """The verdict that a bare number means: 1 correct, 0 wrong, else partial; None and NaN are undecided errors."""
        if score is None or not math.isfinite(score):
            if score is None:
                reason = "no score was given"
            else:
                reason = f"the score is {score}"
            return cls(VerdictStatus.ERROR, None, **{"reason": reason, **more})
        score = float(score)
        # Scores may be negative or above 1: those are partial, too.
        status = {1.0: VerdictStatus.CORRECT, 0.0: VerdictStatus.WRONG}.get(score, VerdictStatus.PARTIAL)
        return cls(status, score, **more)

    @classmethod
    def undecided(cls, reason: str, status: VerdictStatus = VerdictStatus.ERROR, **more: Any) -> Verdict:
        """A verdict that a fault of ours, not of the answer, prevents."""
        return cls(status, None, reason=reason, **more)

    @classmethod
    def raised(cls, what: str, error: BaseException) -> Verdict:
        """The undecided verdict of a verifier that raised; `what` says in words what did."""
        return cls.undecided(f"{what} {type(error).__name__}: {error}", traceback=user_traceback(error))

    def to_json(self) -> dict[str, Any]:
        row = vars(self) | {
            "status": str(self.status),
            "scores": dict(self.scores),
            "spans": [list(span) for span in self.spans],
            "seconds": round(self.seconds, 6),
            "parts": dict(self.parts),
        }
        return {name: value for name, value in row.items() if value or name not in ("traceback", "parts")}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Verdict:
        spans = tuple((int(a), int(b), float(s)) for a, b, s in row.get("spans", ()))
        return cls(**{**row, "status": VerdictStatus(row["status"]), "spans": spans})


@dataclass(frozen=True)
class Segment:
    """A span of a rollout's tokens, [start, end), with a kind: turn, step, think, answer ..."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class SpanScores:
    """Scores of K spans of a rollout's tokens, as a reward term gives them. Spans may overlap. ValueError where the
    arrays differ in length, or a span has no token."""

    start: np.ndarray
    """int64 [K], the first token of each span"""
    end: np.ndarray
    """int64 [K], past its last token"""
    score: np.ndarray
    """float64 [K]; NaN: undecided"""
    weight: float = 1.0
    """The term's weight at the step, which multiplies credit after scores were normalised."""

    def __post_init__(self) -> None:
        if not len(self.start) == len(self.end) == len(self.score):
            raise ValueError(f"{len(self.start)} starts, {len(self.end)} ends and {len(self.score)} scores of spans")
        if (self.start < 0).any() or (self.end <= self.start).any():
            raise ValueError("a span of tokens begins at 0 or later, and has a token at least")

    def __len__(self) -> int:
        return len(self.start)

    def spread(self, length: int) -> np.ndarray:
        """float64 [length]: the score of the span that each token is in, of several the last; NaN in none."""
        values = np.full(length, np.nan)
        for start, end, score in zip(self.start, self.end, self.score, strict=True):
            values[start:end] = score
        return values

    def to_json(self) -> dict[str, Any]:
        scores = [score if math.isfinite(score) else None for score in self.score.tolist()]
        return {"start": self.start.tolist(), "end": self.end.tolist(), "score": scores, "weight": self.weight}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> SpanScores:
        start, end = (np.asarray(row[name], dtype=np.int64) for name in ("start", "end"))
        return cls(start, end, np.asarray(row["score"], dtype=np.float64), float(row["weight"]))


NO_LONGER_RECORDED = frozenset({"episode", "parent", "trained_context", "attachments"})
"""Fields that are empty in every row that an earlier commit recorded."""


@dataclass
class Rollout:
    """One contiguous context as a flat token record; T tokens, prompt included.

    `group` names one draw of a task (a task drawn twice gives two groups) and `member` counts within it.
    `char_ends[t]` is the end of token t in `text`, for completion tokens (else -1).
    """

    id: str
    task: Task
    group: str
    member: int
    token_ids: np.ndarray
    """int64 [T]"""
    origin: np.ndarray
    """int8 [T], values of Origin"""
    behaviour_logprobs: np.ndarray
    """float32 [T], log-probs of the sampling distribution at the temperature sampled; NaN where unknown or not
    sampled"""
    policy_version: np.ndarray
    """int32 [T], the weights that sampled the token; -1 where none did"""
    stop: StopReason
    text: str = ""
    """The completion as verifiers see it."""
    temperature: float = 1.0
    """The temperature sampled at; training divides logits by it."""
    role: str = "policy"
    segments: list[Segment] = field(default_factory=list)
    char_ends: np.ndarray | None = None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    """Numbers that the plan knows of the rollout (a budget, a mode): the columns `note/NAME`."""
    spans: dict[str, SpanScores] = field(default_factory=dict)
    """Scores that reward terms gave to parts of the rollout, by the term's name: the token columns `span/NAME`."""
    term_values: dict[str, float] = field(default_factory=dict)
    """Values of the reward terms that are plain functions, by the term's name (NaN: undecided), so that each is called
    once. Not recorded: the column `reward/TERM` is."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("origin", "behaviour_logprobs", "policy_version"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"rollout {self.id}: {name} has {len(getattr(self, name))} entries for {length} tokens"
                )

    @classmethod
    def given(cls, task: Task, prompt: Sequence[int], response: Sequence[int], **more: Any) -> Rollout:
        """A rollout that nobody sampled: `response`, of origin DEMONSTRATION, after `prompt`."""
        token_ids = np.asarray([*prompt, *response], dtype=np.int64)
        origin = np.full(len(token_ids), Origin.DEMONSTRATION, dtype=np.int8)
        origin[: len(prompt)] = Origin.PROMPT
        # Unknown, so that a ratio to the behaviour policy is refused and not made up.
        unknown = np.full(len(token_ids), np.nan, dtype=np.float32)
        version = np.full(len(token_ids), -1, dtype=np.int32)
        return cls(
            task=task,
            token_ids=token_ids,
            origin=origin,
            behaviour_logprobs=unknown,
            policy_version=version,
            stop=StopReason.GIVEN,
            **more,
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the task's own verifier: the first one given."""
        for verdict in self.verdicts.values():  # faster than next(iter(...)), and read for every rollout
            return verdict
        return None

    @property
    def sampled(self) -> np.ndarray:
        """bool [T]: the tokens that the policy wrote."""
        return self.origin == _POLICY

    @property
    def turns(self) -> list[Segment]:
        """The policy's turns, in order."""
        return [segment for segment in self.segments if segment.kind == "turn"]

    @property
    def completion_length(self) -> int:
        """Tokens that are not prompt."""
        return int((self.origin != Origin.PROMPT).sum())

    def row(self) -> dict[str, Any]:
        """Everything needed to train on or score this rollout again, for an encoder that takes arrays (NaN:
        unknown)."""
        row = vars(self) | {
            "task": self.task.to_json(),
            "stop": str(self.stop),
            "segments": [[s.kind, s.start, s.end] for s in self.segments],
            "verdicts": {name: verdict.to_json() for name, verdict in self.verdicts.items()},
            "spans": {name: scores.to_json() for name, scores in self.spans.items()},
        }
        del row["term_values"]
        return {name: value for name, value in row.items() if name not in ("notes", "spans") or value}

    def to_json(self) -> dict[str, Any]:
        """`row` as JSON types (unknown log-probs are null)."""
        row = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in self.row().items()}
        # JSON has no NaN.
        return row | {"behaviour_logprobs": [None if math.isnan(x) else x for x in row["behaviour_logprobs"]]}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Rollout:
        logprobs = [math.nan if x is None else x for x in row["behaviour_logprobs"]]
        row = {name: value for name, value in row.items() if name not in NO_LONGER_RECORDED}
        return cls(
            **{
                **row,
                "task": Task(**row["task"]),
                "token_ids": np.asarray(row["token_ids"], dtype=np.int64),
                "origin": np.asarray(row["origin"], dtype=np.int8),
                "behaviour_logprobs": np.asarray(logprobs, dtype=np.float32),
                "policy_version": np.asarray(row["policy_version"], dtype=np.int32),
                "stop": StopReason(row["stop"]),
                "segments": [Segment(*s) for s in row["segments"]],
                "verdicts": {name: Verdict.from_json(v) for name, v in row["verdicts"].items()},
                # Rows of earlier versions have neither notes nor spans.
                "spans": {name: SpanScores.from_json(one) for name, one in row.get("spans", {}).items()},
                "char_ends": None if row["char_ends"] is None else np.asarray(row["char_ends"], dtype=np.int64),
            }
        )


@dataclass(frozen=True)
class Group:
    """Some rollouts of a batch seen together: `key` says by what, `index` are their positions in the batch."""

    key: str
    index: np.ndarray
    rollouts: Sequence[Rollout]


@dataclass
class Batch:
    """Rollouts plus named columns per rollout and per token.

    `columns[name]` is float64 [B] with NaN for undecided; `token_columns[name]` holds one array [T_b] per rollout.
    A component declares what it reads and writes by the names it uses. Per-token weights of loss components are the
    token columns `weight/policy`, `weight/likelihood` ...; advantages are the column (or token column) `advantage`.
    """

    rollouts: list[Rollout]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    token_columns: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rollouts)

    def column(self, name: str) -> np.ndarray:
        """The rollout column `name`, float64 [B]. KeyError names the columns there are."""
        if name not in self.columns:
            raise KeyError(f"the batch has no column {name!r}{nearest(name, self.columns)}")
        return self.columns[name]

    def has(self, name: str) -> bool:
        """Return True if there is a rollout column or token column of that name."""
        return name in self.columns or name in self.token_columns

    def tokens(self, name: str) -> list[np.ndarray]:
        """The token column `name`, or a rollout column spread over the tokens. Of the rollouts: `origin`, `source/NAME`
        (1 or 0), `note/NAME` and `span/NAME` (NaN where there is none). KeyError for another name that is no
        column."""
        if name in self.token_columns:
            return self.token_columns[name]
        kind, _, own = name.partition("/")
        if name == "origin":
            return [r.origin for r in self.rollouts]
        if kind == "span":
            return [r.spans[own].spread(len(r)) if own in r.spans else np.full(len(r), np.nan) for r in self.rollouts]
        if kind == "note":
            return [np.full(len(r), r.notes.get(own, np.nan)) for r in self.rollouts]
        if kind == "source":
            return [np.full(len(r), float(r.task.source == own)) for r in self.rollouts]
        return [np.full(len(r), value) for r, value in zip(self.rollouts, self.column(name), strict=True)]

    def group_index(self, key: Callable[[Rollout], str] | None = None) -> np.ndarray:
        """int64 [B]: the group of each rollout, numbered in order of first appearance. `key` defaults to the draw."""
        numbers: dict[str, int] = {}
        if key:
            keys = [key(r) for r in self.rollouts]
        else:
            # By the draw and not by the task: a task that is drawn twice makes two groups with baselines of their own.
            keys = [r.group for r in self.rollouts]
        return np.asarray([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)

    def groups(self, key: Callable[[Rollout], str] | None = None) -> Iterator[Group]:
        """The groups in order of first appearance; they may be ragged."""
        index = self.group_index(key)
        # Stable, so that the members of a group keep their order in the batch.
        order = np.argsort(index, kind="stable")
        for where in np.split(order, np.cumsum(np.bincount(index))[:-1]) if len(index) else ():
            members = [self.rollouts[i] for i in where]
            yield Group(key(members[0]) if key else members[0].group, where, members)

    def with_own_columns(self) -> Batch:
        """The batch as it is now, to which columns that are added or replaced later do not belong."""
        # Shallow: rollouts and arrays are shared, and only the mappings are new.
        return Batch(self.rollouts, dict(self.columns), dict(self.token_columns))

    def select(self, index: Sequence[int] | np.ndarray) -> Batch:
        """The batch of these rollouts, in this order, with all columns."""
        index = np.asarray(index, dtype=np.int64)
        return Batch(
            [self.rollouts[i] for i in index],
            {name: values[index] for name, values in self.columns.items()},
            {name: [values[i] for i in index] for name, values in self.token_columns.items()},
        )

    def digest(self) -> str:
        """A short text that differs where rollouts or columns do: for ranks to compare."""
        # Lengths and columns and not the token ids: these came from rank 0 in one broadcast, while columns are computed
        # anew on each rank, where a difference would make the ranks' weights drift apart.
        sums = hashlib.blake2b(digest_size=16)
        for rollout in self.rollouts:
            sums.update(f"{rollout.group} {rollout.member} {len(rollout)}\n".encode())
            for name, scores in rollout.spans.items():
                sums.update(name.encode() + scores.end.tobytes() + scores.score.tobytes())
        for name in sorted(self.columns):
            sums.update(name.encode() + self.columns[name].tobytes())
        for name in sorted(self.token_columns):
            sums.update(name.encode())
            for values in self.token_columns[name]:
                # Bit for bit: NaN equals itself here, and -0.0 differs from 0.0.
                sums.update(np.ascontiguousarray(values).tobytes())
        return sums.hexdigest()
