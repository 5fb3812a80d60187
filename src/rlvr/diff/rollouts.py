"""The first recorded rollout and token in which two runs differ.

Invariant: two lines are in memory at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlvr.diff.parting import Parting, differ
from rlvr.errors import DataError
from rlvr.monitor.recording import Recorded, read_recorded, recorded_steps
from rlvr.records import Rollout
from rlvr.report.sampled_rollouts import decoder_of

ROUND = 16
"""Tokens shown before and after the first that differs."""

Decode = Callable[[int], str] | None


def compare_rollouts(a: Path, b: Path, tolerance: float, notes: list[str]) -> Parting:
    """The steps that both runs recorded, in order, up to the first in which completions differ; what is made of equal
    ones may differ before."""
    parting = Parting("rollouts")
    try:
        files = recorded_steps(a), recorded_steps(b)
    except DataError as error:
        notes.append(str(error))
        return parting
    decode: tuple[Decode, Decode] = decoder_of(a), decoder_of(b)
    for step in sorted(files[0].keys() & files[1].keys()):
        parting.compared += 1
        pairs = itertools.zip_longest(*(read_recorded(of_run[step], notes) for of_run in files))
        for number, (one, other) in enumerate(pairs, start=1):
            written = _written(number, one, other, decode)
            # Different verdicts or log-probs of equal tokens are reported for the first such rollout only; the search
            # goes on for the first that differs in tokens.
            lines = written or ([] if parting.step else _made_of_it(number, one, other, tolerance))
            if lines:
                parting.step = parting.step or step
                parting.lines += [f"step {step}, {lines[0]}", *lines[1:]]
            if written:
                return parting
    return parting


def _written(number: int, one: Recorded | None, other: Recorded | None, decode: tuple[Decode, Decode]) -> list[str]:
    """A description of the difference in tokens between two rollouts; empty where there is none."""
    if one is None or other is None:
        return [f"line {number}: one run has {number - 1} rollouts, the other more"]
    a = one.rollout
    b = other.rollout
    where = _where(number, a)
    if (a.group, a.member, a.role, a.task.id) != (b.group, b.member, b.role, b.task.id):
        return [f"{where}: the other run has group {b.group}, member {b.member}, task {b.task.id}"]
    place = _first(a.token_ids, b.token_ids)
    if place is None:
        return []
    # Origin 0 is the prompt, so this is the first token of the completion.
    begins = [np.flatnonzero(r.origin != 0) for r in (a, b)]
    first = min((int(b[0]) for b in begins if len(b)), default=0)
    if place >= first:
        part = f"token {place - first} of the completion"
    else:
        part = f"token {place} of the prompt"
    return [f"{where}: they part at {part}", *(_round(r, place, d) for r, d in zip((a, b), decode, strict=True))]


def _made_of_it(number: int, one: Recorded | None, other: Recorded | None, tolerance: float) -> list[str]:
    """Descriptions of the other differences between two rollouts of the same tokens: log-probs, versions, stop reason,
    verdicts, columns, use."""
    assert one is not None and other is not None
    a = one.rollout
    b = other.rollout
    where = f"{_where(number, a)}: the same tokens"
    for name, values in (("log-prob", "behaviour_logprobs"), ("version", "policy_version"), ("origin", "origin")):
        x = np.asarray(getattr(a, values), dtype=np.float64)
        y = np.asarray(getattr(b, values), dtype=np.float64)
        place = _first(x, y, tolerance)
        if place is not None:
            return [f"{where}, another {name} of token {place}: {x[place]:.9g} and {y[place]:.9g}"]
    lines = []
    if a.stop != b.stop:
        lines = [f"stopped by {a.stop} and by {b.stop}"]
    for name in dict.fromkeys([*a.verdicts, *b.verdicts]):
        verdicts = a.verdicts.get(name), b.verdicts.get(name)
        judged = [v and (v.status, v.score) for v in verdicts]
        if judged[0] != judged[1]:
            shown = [f"{v.status}, {v.score} ({v.reason})" if v else "none" for v in verdicts]
            lines.append(f"the verdict of {name}: {shown[0]}; {shown[1]}")
    for name in (name for name in one.columns if name in other.columns):
        if differ(one.columns[name], other.columns[name], tolerance):
            lines.append(f"{name}: {one.columns[name]:.9g} and {other.columns[name]:.9g}")
    if one.use != other.use:
        lines.append(f"{one.use} and {other.use}")
    return [f"{where}, {line}" for line in lines]


def _where(number: int, rollout: Rollout) -> str:
    return f"line {number}, group {rollout.group}, member {rollout.member}, task {rollout.task.id}"


def _first(x: np.ndarray, y: np.ndarray, tolerance: float = 0.0) -> int | None:
    """The first place where two arrays differ; the end of the shorter where one goes on."""
    count = min(len(x), len(y))
    # The second half: NaN in both (x != x) is equal.
    same = (x[:count] == y[:count]) | ((x[:count] != x[:count]) & (y[:count] != y[:count]))
    if tolerance:
        # As `differ`, for arrays.
        scale = np.maximum(1.0, np.maximum(np.abs(x[:count]), np.abs(y[:count])))
        same |= (np.abs(x[:count] - y[:count]) <= tolerance * scale) & np.isfinite(scale)
    places = np.flatnonzero(~same)
    if len(places):
        return int(places[0])
    return None if len(x) == len(y) else count


def _round(rollout: Rollout, place: int, decode: Decode) -> str:
    """The tokens round a place as text, or as ids where the run left no tokenizer."""
    ids = rollout.token_ids.tolist()
    head = ids[max(0, place - ROUND) : place]
    tail = ids[place : place + ROUND]
    if decode is None:
        return f"  tokens {head} | {tail} of {rollout.text!r}"
    return f"  {''.join(map(decode, head))!r} | {''.join(map(decode, tail))!r} (token {tail[0] if tail else 'none'})"
