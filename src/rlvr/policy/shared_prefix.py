"""What rollouts of a group begin with in common, and the runs of a packed row in which it is computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rlvr.policy.attention import Spans
from rlvr.records import Batch


@dataclass(frozen=True)
class Shared:
    """Tokens that rollouts of a group have in common at their beginning, as trees: what all members share, what some
    of them share after it, and so on."""

    cluster: np.ndarray
    """int64 [R]: the group of each rollout, numbered from 0"""
    trunks: list[list[tuple[int, int]]]
    """For each rollout the shared runs that it begins with: the run's number and the token past its end, outermost
    first"""

    @classmethod
    def nothing(cls, count: int) -> Shared:
        """Of rollouts that are laid out each for itself."""
        return cls(np.arange(count), [[] for _ in range(count)])

    @cached_property
    def prefix(self) -> np.ndarray:
        """int64 [R]: tokens that all of a rollout's group begin with; 0 where it is alone."""
        return np.asarray([trunks[0][1] if trunks else 0 for trunks in self.trunks], dtype=np.int64)

    @cached_property
    def branch(self) -> np.ndarray:
        """int64 [R]: the innermost shared run of each rollout, -1 without any: what keeps neighbours together."""
        return np.asarray([trunks[-1][0] if trunks else -1 for trunks in self.trunks], dtype=np.int64)

    def select(self, part: np.ndarray) -> Shared:
        """Of some of the rollouts."""
        return Shared(self.cluster[part], [self.trunks[i] for i in part])


def shared_prefixes(batch: Batch, index: np.ndarray, worth: float = math.inf) -> Shared:
    """What the rollouts at `index` share with their group, found from their token ids.

    What all of a group begin with is shared whatever its length; what only some of them share further on where that
    saves at least `worth` tokens, since each level of sharing is another attention call.
    """
    numbers: dict[str, int] = {}
    cluster = np.asarray([numbers.setdefault(batch.rollouts[i].group, len(numbers)) for i in index], dtype=np.int64)
    trunks: list[list[tuple[int, int]]] = [[] for _ in index]
    count = 0
    for number in range(len(numbers)):
        # (members, tokens that they are known to share, the end of the last run that is shared)
        open_sets = [(np.flatnonzero(cluster == number), 0, 0)]
        while open_sets:
            members, known, end = open_sets.pop()
            if len(members) < 2:
                continue
            ids = [batch.rollouts[index[m]].token_ids for m in members]
            common = known + _common([one[known:] for one in ids])
            saved = (len(members) - 1) * (common - end)
            if common > end and (end == 0 or saved >= worth):
                for m in members:
                    trunks[m].append((count, common))
                count += 1
                end = common
            open_sets.extend((part, common, end) for part in _branches(members, ids, common))
    return Shared(cluster, trunks)


def _branches(members: np.ndarray, ids: Sequence[np.ndarray], common: int) -> list[np.ndarray]:
    """The members that go on with the same token after the first `common`; those that end there are in none."""
    longer = np.asarray([len(one) > common for one in ids])
    tokens = np.asarray([one[common] for one in ids if len(one) > common], dtype=np.int64)
    return [members[longer][tokens == token] for token in np.unique(tokens)]


def _common(ids: Sequence[np.ndarray]) -> int:
    """The length of the longest prefix that all have."""
    shortest = min(len(one) for one in ids)
    # bool [shortest]: places at which all have the token of the first.
    same = np.all([one[:shortest] == ids[0][:shortest] for one in ids[1:]], axis=0)
    if same.all():
        return shortest
    return int(np.argmin(same))


@dataclass(frozen=True)
class Runs:
    """The division of R rollouts of a micro-batch into S runs of one row."""

    spans: Spans
    segments: list[tuple[int, int, int]]
    """(rollout, first token, past the last token) of each run"""
    places: list[np.ndarray]
    """int64 for each rollout: the place of each of its tokens in the row"""


def runs_of(lengths: np.ndarray, shared: Shared, device: torch.device) -> Runs:
    """Runs of rollouts in the order given. What is shared with a rollout outside of these is no run of its own."""
    sharers = Counter(number for trunks in shared.trunks for number, _ in trunks)
    segments: list[tuple[int, int, int]] = []
    context: list[int] = []
    places: list[np.ndarray] = []
    # The run of each shared trunk, and where it starts.
    laid: dict[int, tuple[int, int]] = {}
    end_of_row = 0
    for r, trunks in enumerate(shared.trunks):
        parts: list[np.ndarray] = []
        above = -1
        begin = 0
        for number, end in trunks:
            if sharers[number] < 2:
                continue
            if number not in laid:
                laid[number] = (len(segments), end_of_row)
                segments.append((r, begin, end))
                context.append(above)
                end_of_row += end - begin
            above, start = laid[number]
            parts.append(np.arange(start, start + end - begin))
            begin = end
        # A rollout may be nothing but what it shares (an empty response) and then has no run of its own.
        if lengths[r] > begin:
            segments.append((r, begin, int(lengths[r])))
            context.append(above)
            parts.append(np.arange(end_of_row, end_of_row + int(lengths[r]) - begin))
            end_of_row += int(lengths[r]) - begin
        places.append(np.concatenate(parts))
    length = np.asarray([end - first for _, first, end in segments], dtype=np.int64)
    return Runs(Spans(length, np.asarray(context, dtype=np.int64), device), segments, places)
