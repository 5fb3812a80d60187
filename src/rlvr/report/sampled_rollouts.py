"""The choice of recorded rollouts for the page, counts over all that are read, and the characters of a completion that
each sampled token wrote, for colours.

The map of characters is exact where the texts of the single tokens join to the text, as they do for nearly all; where
they do not (a character that several tokens share, a space that a tokenizer swallows), the next token that is found
sets it right.

Invariants: at most `BYTES` of rollout files are read, in whole steps spread evenly over the run; at most as many
rollouts as asked for are shown, in whole groups: the last step first, the others in equal numbers, of demonstrations a
tenth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlvr.report.folder import RunData

BYTES = 100_000_000
"""Of rollout files, over all runs of a page: what is read in a few seconds."""
# About 5,000 tokens: longer texts are cut in the middle, and have no colours.
TEXT = 20_000
"""Longest text of a prompt or completion that is shown."""
# Columns of a histogram over time: 6 units of the chart's 356 each.
COLUMNS = 60
BINS = 24
"""Of a histogram over time."""


@dataclass
class Read:
    """Rollouts of a run that were read."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[int, list[float]] = field(default_factory=dict)
    """By step."""
    rewards: dict[int, list[float]] = field(default_factory=dict)
    note: str = ""


def read_rollouts(run: RunData, limit: int, byte_limit: int) -> Read:
    """Read a run's recorded rollouts within `byte_limit` bytes, and choose `limit` of them to show."""
    files = run.rollout_files
    chosen = _spread(files, byte_limit)
    result = Read()
    bad = 0
    count = 0
    of_last = 0
    decode = decoder_of(run.path)
    # The last step first, whole where it takes no more than half of the page: it shows what was learned.
    shares = _shares(run, [step for step, _ in chosen[:-1]])
    for step, path in [*chosen[-1:], *chosen[:-1]]:
        if step == chosen[-1][0]:
            quota = limit // 2 if len(chosen) > 1 else limit
        else:
            # Cumulative, so that rounding leaves no rollout out: after all steps the sum of the quotas is `limit`.
            quota = of_last + int((limit - of_last) * shares[step]) - len(result.shown)
        groups: dict[str, list[dict[str, Any]]] = {}
        size = 0
        for line in _lines(path, byte_limit):
            try:
                row = json.loads(line)
                group = str(row["group"])
                length = _length(row)
                reward = row.get("columns", {}).get("reward")
            # Whatever a line of wrong types or missing keys raises; it is counted and left out.
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                bad += 1
                continue
            count += 1
            result.lengths.setdefault(step, []).append(length)
            if isinstance(reward, (int, float)) and math.isfinite(reward):
                result.rewards.setdefault(step, []).append(float(reward))
            # Once a group is begun, all its members are taken, which may go over the quota; the cut below ends it.
            if group in groups or size < quota:
                groups.setdefault(group, []).append(row)
                size += 1
        for row in _whole(list(groups.values()), max(quota, 0)):
            try:
                result.shown.append(_shown(row, step, decode))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                bad += 1
        if step == chosen[-1][0]:
            of_last = len(result.shown)
    result.shown.sort(key=lambda row: row["step"])
    result.note = _note(run, files, chosen, count, len(result.shown), bad)
    return result


def _shares(run: RunData, steps: Sequence[int]) -> dict[int, float]:
    """The share of the page that the steps up to each may fill. A step of demonstrations, which the policy did not
    write, counts a tenth of one that was sampled."""
    given = {row["step"] for row in run.rows if row.get("reward/mean") is None and not row.get("tokens/sampled")}
    weights = np.cumsum([0.1 if step in given else 1.0 for step in steps])
    return {step: float(weight / weights[-1]) for step, weight in zip(steps, weights, strict=True)}


def _whole(groups: Sequence[Sequence[dict[str, Any]]], quota: int) -> list[dict[str, Any]]:
    """Whole groups of at most `quota` rollouts; where not even the first fits, as many of its members."""
    rows: list[dict[str, Any]] = []
    for members in groups:
        if len(rows) + len(members) > quota:
            break
        rows += members
    return rows or list(groups[0][:quota] if groups else [])


def _spread(files: Sequence[tuple[int, Path]], byte_limit: int) -> list[tuple[int, Path]]:
    """All files where they fit, else as many as do, evenly from the first to the last."""
    total = sum(path.stat().st_size for _, path in files)
    if total <= byte_limit or len(files) < 2:
        return list(files)
    # The first and the last step always, and others between them at equal distances.
    number = max(2, int(len(files) * byte_limit / total))
    places = sorted({round(i * (len(files) - 1) / (number - 1)) for i in range(number)})
    return [files[place] for place in places]


def _lines(path: Path, byte_limit: int) -> Iterator[str]:
    """The lines of a file, no further than the limit."""
    read = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            read += len(line)
            if read > byte_limit:
                return
            yield line


def _length(row: Mapping[str, Any]) -> int:
    return sum(origin != 0 for origin in row["origin"])


def _shown(row: Mapping[str, Any], step: int, decode: Any) -> dict[str, Any]:
    """The fields of a rollout on the page. Values of tokens are in thousandths, None where unknown."""
    task = row["task"]
    columns = row.get("columns", {})
    tokens = row.get("tokens", {})
    verdict: Mapping[str, Any] = next(iter(row.get("verdicts", {}).values()), {})
    text = str(row.get("text", ""))
    sampled = [place for place, origin in enumerate(row["origin"]) if origin == 1]
    ends: list[int] = []
    if row.get("char_ends"):
        ends = [row["char_ends"][place] for place in sampled]
    elif decode:
        ends = ends_of(text, [row["token_ids"][place] for place in sampled], decode)
    shown = {
        "step": step,
        "task": str(task.get("id", "")),
        "group": str(row["group"]),
        "member": row.get("member"),
        "prompt": _prompt(task.get("prompt", "")),
        "text": _cut(text),
        "gold": None if task.get("answer") is None else _cut(str(task["answer"])),
        "answer": verdict.get("answer"),
        "status": str(verdict.get("status", "not verified")),
        "score": verdict.get("score"),
        "reason": _cut(str(verdict.get("reason", ""))),
        "stop": str(row.get("stop", "")),
        "tokens": _length(row),
        "reward": columns.get("reward"),
        "advantage": columns.get("advantage"),
        "columns": {k: v for k, v in columns.items() if k.startswith("reward/")},
    }
    if len(row.get("verdicts", {})) > 1:
        shown["verdicts"] = {
            name: [v.get("status"), v.get("score"), v.get("reason")] for name, v in row["verdicts"].items()
        }
    if ends and len(text) <= TEXT:
        shown["ends"] = ends
        shown["logprob"] = _thousandths([row["behaviour_logprobs"][place] for place in sampled])
        for name in ("log_ratio", "advantage"):
            if len(tokens.get(name, ())) == len(sampled):
                shown[f"token_{name}"] = _thousandths(tokens[name])
    return shown


def _thousandths(values: Sequence[float | None]) -> list[int | None]:
    # Integers are a third of the characters of floats, and three decimals are more than a tint shows.
    return [None if value is None else round(1000 * value) for value in values]


def _prompt(prompt: Any) -> str:
    """A prompt as one text: a string as it is, chat messages as `role: content`."""
    if isinstance(prompt, list):
        parts = [m if isinstance(m, dict) else {"content": m} for m in prompt]
        return _cut("\n".join(f"{part.get('role', '?')}: {part.get('content', '')}" for part in parts))
    return _cut(str(prompt))


def _cut(text: str) -> str:
    """A text short enough to be shown, its head and its end, without lone surrogates."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= TEXT:
        return text
    half = TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _note(run: RunData, files: Sequence[Any], chosen: Sequence[Any], count: int, shown: int, bad: int) -> str:
    if not files:
        return ""
    text = f"{run.name}: {shown:,} of {count:,} rollouts that were read are shown"
    if len(chosen) < len(files):
        text += f"; read were {len(chosen):,} of {len(files):,} recorded steps, spread over the run"
    return text + (f"; {bad} lines could not be read" if bad else "")


def histogram(by_step: Mapping[int, Sequence[float]]) -> dict[str, Any] | None:
    """Counts of values by step and value: columns of neighbouring steps, rows of equal width over all values."""
    steps = sorted(by_step)
    if not steps:
        return None
    values = np.concatenate([np.asarray(by_step[step], dtype=np.float64) for step in steps])
    low = float(values.min())
    high = float(values.max())
    # Equal values: one bin of width 0 would divide by zero.
    high = high if high > low else low + 1.0
    edges = np.linspace(low, high, BINS + 1)
    parts = [part for part in np.array_split(np.asarray(steps), min(COLUMNS, len(steps))) if len(part)]
    counts = [np.histogram(np.concatenate([by_step[int(step)] for step in part]), edges)[0].tolist() for part in parts]
    return {"edges": edges.tolist(), "steps": [[int(p[0]), int(p[-1])] for p in parts], "counts": counts}


# For characters that a tokenizer drops or that several tokens share. With a larger one, a short token could be found
# too far on, and shift the rest.
AHEAD = 8
"""Characters that a token may begin after the end of the one before it."""


def decoder_of(run: Path) -> Callable[[int], str] | None:
    """The text of a token id, by the tokenizer that the run saved with its newest checkpoint; None where there is
    none."""
    files = sorted(run.glob("checkpoints/step-*/model/tokenizer.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(files[-1]))
    except Exception:  # what a foreign tokenizer file raises is not documented; without it there are no colours
        return None
    texts: dict[int, str] = {}

    def decode(token: int) -> str:
        if token not in texts:
            texts[token] = tokenizer.decode([token], skip_special_tokens=True)
        return texts[token]

    return decode


def ends_of(text: str, ids: Sequence[int], decode: Callable[[int], str]) -> list[int]:
    """For each sampled token, the end of its characters in `text`: never falling, at most the length of the text."""
    ends: list[int] = []
    at = 0
    for token in ids:
        written = decode(token)
        # U+FFFD stands for a part of a character (an emoji of several tokens): such a token gets no characters of its
        # own, and the token that completes the character gets all of them.
        if written and "\ufffd" not in written:
            start = text.find(written, at, at + len(written) + AHEAD)
            at = start + len(written) if start >= 0 else at
        ends.append(at)
    return ends
