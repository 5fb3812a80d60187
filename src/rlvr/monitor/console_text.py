"""Text that anyone may have written, made fit to show; a step's metrics as short cells of text, the same for the table
on a terminal and the line in a log.

Invariants:
- What comes out holds no control character but newline, and no lone surrogate: it cannot move a cursor, colour a
  terminal, forge a line or fail to encode as UTF-8.
- What is replaced is shown as its Python escape (`\x1b`), so that nothing vanishes.
- A metric that is None or absent has no cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# C0, C1 and DEL; line and paragraph separators; marks that turn the direction of writing; lone surrogates. Matches the
# "\x1b" of "\x1b[31m" and "\u202e"; must not match "\n", "é" or an emoji, which are valid outside of these ranges.
_ODD = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(text: object) -> str:
    """`text` with tabs as spaces, Windows line ends as newlines and every other odd character escaped."""
    plain = str(text).replace("\r\n", "\n").replace("\t", "    ")
    return _ODD.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), plain)


def shorten(text: str, limit: int) -> str:
    """`text` in about `limit` characters: a third from its head, the rest from its tail, where answers are."""
    if len(text) <= limit:
        return text
    # A final answer is at the end, so the tail gets two thirds.
    head = limit // 3
    tail = limit - head
    return f"{text[:head]} [... {len(text) - limit} characters ...] {text[-tail:]}"


# The two non-ASCII signs that the console itself writes: `±` and the bars of a sparkline, as digits 1 to 8.
_ASCII = str.maketrans({"±": "+-", **{bar: str(height) for height, bar in enumerate("▁▂▃▄▅▆▇█", start=1)}})


def encodable(text: str, encoding: str) -> str:
    """`text` as a stream of that encoding can hold it; what it cannot is shown as its escape."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


_BARS = "▁▂▃▄▅▆▇█"
_GROUPS = ("all_correct", "mixed", "all_wrong")
_PHASES = ("rollout", "verify", "score", "update", "publish", "unaccounted")

# As wide as the cells beside it.
TREND = 8
"""Steps of the sparkline in a row of the table."""

Cells = dict[str, str]
"""Title -> text."""


def step_cells(metrics: Mapping[str, Any], rewards: Sequence[float], scale: Sequence[float] = ()) -> Cells:
    """Return the cells of a step's line; `rewards` are the mean rewards of the last steps, oldest first, `scale` the
    lowest and the highest that the trend is drawn between."""
    get = metrics.get
    cells: dict[str, str | None] = {"step": number(get("step"))}
    if get("reward/mean") is None:
        cells["loss"] = _if(get("loss/total"), number)
    else:
        spread = _if(get("reward/std"), lambda std: f" ±{std:.2f}") or ""
        cells["reward"] = f"{get('reward/mean'):.3f}{spread}"
        cells["trend"] = sparkline(rewards, scale)
    cells["length"] = _if(get("completion/length_mean"), lambda length: f"{length:.0f}")
    groups = [_if(get(f"group/{kind}"), lambda share: f"{100 * share:.0f}") for kind in _GROUPS]
    if None not in groups:
        cells["right/mixed/wrong"] = "/".join(map(str, groups)) + "%"
    cells["kl"] = _if(get("kl/ref"), number)
    cells["grad"] = _if(get("grad_norm"), number)
    cells["tok/s"] = _if(get("time/tokens_per_second"), lambda rate: f"{rate:.0f}")
    # The peak of a step is the largest peak of its phases; `_max` is already over ranks.
    peaks = [size for phase in _PHASES if (size := get(f"memory/{phase}_max")) is not None]
    cells["mem"] = f"{max(peaks):.1f}GiB" if peaks else None
    cells["mfu"] = _if(get("mfu/update"), lambda share: f"{100 * share:.0f}%")
    cells["time"] = _if(get("time/step"), lambda seconds: f"{seconds:.1f}s{_shares(metrics, seconds)}")
    return {title: text for title, text in cells.items() if text is not None}


def _if(value: Any, form: Callable[[Any], str]) -> str | None:
    return None if value is None else form(value)


def _shares(metrics: Mapping[str, Any], total: float) -> str:
    """The phases that took at least 5 % of the step, in the order of the loop."""
    shares = {name: (metrics.get(f"time/{name}") or 0.0) / total if total else 0.0 for name in _PHASES}
    names = {"unaccounted": "other"}
    return "".join(f" {names.get(n, n)} {100 * share:.0f}%" for n, share in shares.items() if share >= 0.05)


def number(value: Any) -> str:
    """Three significant digits for a float, never with an exponent; the text of anything else; `-` for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    if not math.isfinite(value) or not value:
        return f"{value:.3g}"
    # What `.3g` would write with an exponent; files have all digits.
    if size >= 1000:
        return f"{value:.0f}" if size < 1e5 else f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.3g}"
    return f"{value:.6f}" if size >= 1e-5 else "<0.00001" if value > 0 else ">-0.00001"


def percent(value: Any) -> str:
    """A share as `98.0 %`; a score outside 0 to 1, as a function may give, as `number` shows it."""
    if isinstance(value, float) and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return number(value)


_SCORES = ("greedy", "pass@", "maj@", "best@", "mean")
_FAULTS = {"truncated": "cut", "unparsable": "unparsable", "undecided": "undecided"}


def evaluation_lines(results: Mapping[str, Any]) -> list[str]:
    """The results of an evaluation: scores and faults of all tasks in one line, and a line for each of their parts."""
    plain = {name.removeprefix("eval/"): value for name, value in results.items() if value is not None}
    parts: dict[str, dict[str, Any]] = {"": {}}
    for name, value in plain.items():
        part, _, quantity = name.rpartition("/")
        if quantity.startswith(_SCORES):
            parts.setdefault(part, {})[quantity] = value
    lines = []
    for part, scores in parts.items():
        if scores.get("mean") == scores.get("pass@1"):  # every score is 0 or 1, and the two are one number
            scores.pop("mean", None)
        shown = [f"{quantity} {percent(value)}" for quantity, value in scores.items()]
        if not part:
            shown += [f"{word} {percent(plain[name])}" for name, word in _FAULTS.items() if plain.get(name)]
            shown += [f"{number(plain['tasks'])} tasks"] if "tasks" in plain else []
        lines.append("  ".join([f"  {part}:", *shown] if part else shown))
    return lines


# First what a reader misses least.
_LEAST_NEEDED = ("mfu", "mem", "tok/s", "kl", "grad", "trend", "length")


def fitting(cells: Cells, room: int, line: Callable[[Cells], str]) -> Cells:
    """The cells whose `line` has at most `room` columns: shares of the time go first, then whole cells."""
    cells = dict(cells)
    if len(line(cells)) > room and "time" in cells:
        cells["time"] = cells["time"].split(" ")[0]
    for title in _LEAST_NEEDED:
        if len(line(cells)) <= room:
            break
        cells.pop(title, None)
    return cells


# Widths of usual values; a longer one pushes its row out of line and is not cut. 11 holds `0.123 ±0.45`.
_WIDTHS = {"step": 5, "reward": 11, "trend": TREND, "length": 6, "kl": 7, "grad": 7, "tok/s": 5}


def aligned_row(cells: Cells) -> str:
    """The cells of a row, right-aligned under their titles; the last one has no width."""
    *aligned, last = cells.items()
    return "  ".join([*(text.rjust(max(len(title), _WIDTHS.get(title, 0))) for title, text in aligned), last[1]])


def trend_scale(lowest: float, highest: float) -> tuple[float, float]:
    """The ends of the scale of a trend: 0 and 1 for rewards between them, else the rewards' own, around their middle
    and at least a fifth of the largest apart. A change that is small beside the reward is so drawn small."""
    if lowest >= 0 and highest <= 1:
        return 0.0, 1.0
    half = max(highest - lowest, max(abs(lowest), abs(highest)) / 5) / 2
    middle = (lowest + highest) / 2
    return middle - half, middle + half


def sparkline(values: Sequence[float], scale: Sequence[float] = ()) -> str:
    """One bar per value; the lowest and the highest of `scale` (else of the values) are the ends of the scale."""
    low = min(scale or values, default=0.0)
    high = max(scale or values, default=0.0)
    # Equal values have no scale: all are drawn as the lowest bar.
    height = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * height)] for value in values)


def duration(seconds: float) -> str:
    """Seconds as `h:mm:ss` or `m:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"
