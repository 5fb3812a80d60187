"""A context as it grows: the prompt, what the policy sampled, what others put between.

Token in, token out: sampled ids are kept as they came, with the log-probs and versions of their own call; what others
wrote has NaN and -1. A context only ever grows at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.data import Draw
from rlvr.records import Origin, Rollout, Segment, StopReason
from rlvr.rollout.engine import Completion

_COLUMNS = {"token_ids": np.int64, "origin": np.int8, "behaviour_logprobs": np.float32, "policy_version": np.int32}


class Context:
    """The tokens of one rollout so far."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        self._segments: list[Segment] = []
        self._texts: list[str] = []
        self._seconds = 0.0
        self.sampled = 0
        """Tokens that the policy wrote."""
        self._length = 0
        self._extend(prompt, Origin.PROMPT)

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, as a request takes them."""
        return tuple(np.concatenate(self._parts["token_ids"]).tolist())

    @property
    def texts(self) -> tuple[str, ...]:
        """The policy's turns."""
        return tuple(self._texts)

    def turn(self, completion: Completion) -> None:
        """What the policy sampled after the tokens so far."""
        self._segments.append(Segment("turn", len(self), len(self) + len(completion.token_ids)))
        self._extend(completion.token_ids, Origin.POLICY, completion.logprobs, completion.versions)
        self._texts.append(completion.text)
        self._seconds += completion.seconds
        self.sampled += len(completion.token_ids)

    def put(self, kind: str, token_ids: Sequence[int], origin: Origin) -> None:
        """A segment that the policy did not write."""
        self._segments.append(Segment(kind, len(self), len(self) + len(token_ids)))
        self._extend(token_ids, origin)

    def rollout(self, draw: Draw, member: int, stop: StopReason, temperature: float, **timings: float) -> Rollout:
        """The record. Its text is what the policy wrote and nothing else: its turns, each on lines of its own."""
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        return Rollout(
            id=f"{draw.number}/{member}",
            task=draw.task,
            group=str(draw.number),
            member=member,
            token_ids=columns["token_ids"],
            origin=columns["origin"],
            behaviour_logprobs=columns["behaviour_logprobs"],
            policy_version=columns["policy_version"],
            stop=stop,
            text="\n".join(self._texts),
            temperature=temperature or 1.0,
            segments=self._segments,
            timings={"generate": self._seconds, **timings},
        )

    def _extend(
        self,
        token_ids: Sequence[int] | np.ndarray,
        origin: Origin,
        logprobs: Sequence[float] | np.ndarray | float = np.nan,
        versions: Sequence[int] | np.ndarray | int = -1,
    ) -> None:
        count = len(token_ids)
        for (name, dtype), value in zip(_COLUMNS.items(), (token_ids, origin, logprobs, versions), strict=True):
            one = isinstance(value, (int, float))
            self._parts[name].append(np.full(count, value, dtype) if one else np.asarray(value, dtype))
        self._length += count
