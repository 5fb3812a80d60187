"""One group of a batch as text, with the verdict of each completion.

Invariants:
- A sample is short however long the texts are, and every text in it went through `clean`.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from rlvr.monitor.batch import prompt_text
from rlvr.monitor.console_text import clean, number, shorten
from rlvr.records import Batch, Rollout

T = TypeVar("T")

Block = tuple[str, str]
"""(style, text), the style as rich names it."""

_STYLES = {"correct": "bold green", "partial": "bold yellow", "wrong": "bold red"}
# A completion of many short lines would push the rest of the group off the screen; it is shown as one wrapped
# paragraph.
_MOST_LINES = 12


def sample_blocks(batch: Batch, completions: int = 4, characters: int = 400) -> list[Block]:
    """A group with different verdicts (else the first): its prompt, gold answer and some completions with verdicts.

    At most `completions` of them, one of each status before a second of any, each in about `characters`.
    """
    groups = list(batch.groups())
    if not groups:
        return []
    # A group with different verdicts shows what tells right from wrong; a uniform one shows one kind of answer only.
    group = next((g for g in groups if len({_status(r) for r in g.rollouts}) > 1), groups[0])
    task = group.rollouts[0].task
    shown = in_turns(group.rollouts, _status)[:completions]
    blocks = [
        ("bold", f"sample: task {clean(task.id)}"),
        ("", _indented(prompt_text(task.prompt), characters)),
        ("bold", f"gold answer: {clean(shorten(str(task.answer), characters)) if task.answer is not None else 'none'}"),
    ]
    for rollout in shown:
        blocks.append((_STYLES.get(_status(rollout), "bold"), _heading(rollout)))
        blocks.append(("", _indented(rollout.text, characters)))
    if len(shown) < len(group.rollouts):
        blocks.append(("dim", f"... and {len(group.rollouts) - len(shown)} more"))
    return blocks


def _status(rollout: Rollout) -> str:
    if rollout.verdict:
        return str(rollout.verdict.status)
    return "not verified"


def in_turns(items: Iterable[T], kind: Callable[[T], Hashable]) -> list[T]:
    """The items, the first of each kind, then the second of each, and so on."""
    seen: Counter[Hashable] = Counter()
    turns: list[tuple[int, T]] = []
    for item in items:
        turns.append((seen[kind(item)], item))
        seen[kind(item)] += 1
    # The sort is stable, so that items of one turn keep their order.
    return [item for _, item in sorted(turns, key=lambda entry: entry[0])]


def _heading(rollout: Rollout) -> str:
    verdict = rollout.verdict
    tokens = f"{rollout.completion_length} tokens{', cut' if rollout.stop.truncated else ''}"
    if verdict is None:
        return f"#{rollout.member} {_status(rollout)}, {tokens}"
    if verdict.score is None:
        score = "undecided"
    else:
        score = f"score {number(verdict.score)}"
    reason = " ".join(clean(shorten(verdict.reason, 200)).split())
    return f"#{rollout.member} {_status(rollout)}, {score}, {tokens}" + (f": {reason}" if reason else "")


def _indented(text: str, characters: int) -> str:
    lines = [line for line in clean(shorten(text.strip(), characters)).split("\n") if line.strip()]
    if len(lines) > _MOST_LINES:
        lines = [" / ".join(line.strip() for line in lines)]
    return textwrap.indent("\n".join(lines) or "(empty)", "    ")
