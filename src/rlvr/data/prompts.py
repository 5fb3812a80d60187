"""Prompts as token ids, encoded in batches and kept in arrays, and the replies that follow a turn of the policy's.

Invariants: the ids of a prompt do not depend on the batch that it was encoded in; a prompt is encoded once, whichever
stages and evaluations use it; memory is 4 bytes a token and 28 bytes a prompt.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rlvr.data.replies import Frame, frame_of, reply_ids
from rlvr.data.templates import Template, render_demonstrations, render_prompts
from rlvr.data.tokenizer_copy import TokenizerCopy
from rlvr.errors import DataError
from rlvr.records import Task

log = logging.getLogger(__name__)

BATCH_PROMPTS = 1000
"""Prompts that are encoded in one call: more are no faster."""
BATCH_CHARACTERS = 2_000_000
"""Characters in one call, about: a tokenizer needs some hundred bytes for each token until it returns."""
RECENT = 4096
"""Prompts that were encoded alone (of tasks made or rewritten during the run) and are kept: those of a few steps."""
GROWTH = 1.125
"""Size of the array of token ids beside what it holds, when it is enlarged: fewer copies where `realloc` has to
copy."""
PROGRESS_SECONDS = 5.0
"""Encoding that takes longer is reported."""

_LOST = 5
"""Characters without a token that a warning names."""

# n^2 / 2^129 pairs collide by chance: 10^12 / 7e38 = 1e-27.
_DIGEST = 16
"""Bytes of a prompt's key. Two of a million prompts share 128 bits with a probability of 1e-27."""


@dataclass(frozen=True)
class _Block:
    """The prompts that were encoded together, by key."""

    keys: np.ndarray
    """S16 [P], ascending."""
    starts: np.ndarray
    """int64 [P]: where in `ids` a prompt begins."""
    lengths: np.ndarray
    """int32 [P]"""
    ids: np.ndarray
    """int32, the token ids of all prompts."""

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions [N] of keys [N] in the block, and bool [N] for which there are any."""
        # A key behind the last one would give a position past the end; it is compared like any other and found
        # different.
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return at, self.keys[at] == keys


def refuse_long(tasks: Sequence[Task], lengths: np.ndarray, context: int) -> None:
    """DataError that names the first evaluation task whose prompt leaves no token of `context` for a response.

    `lengths`: tokens of each task's prompt, int32 [N].
    """
    for task, length in zip(tasks, lengths.tolist(), strict=True):
        if length >= context:
            raise DataError(
                f"{task.place}{', ' if task.place else ''}evaluation task {task.id!r}: its prompt has {length} "
                f"tokens, and the context of {context} tokens (the smaller one of the model's and the engine's) "
                "leaves none for a response: shorten it or leave it out"
            )


class Prompts:
    """The token ids of tasks' prompts under one template; calling it with a task gives them.

    `lengths` encodes many at once and keeps them. A prompt that is asked for without that is encoded alone, and kept
    for a while. `report` is called with a line of text where encoding takes seconds. Threads may share it: it encodes
    with a copy of the tokenizer.
    """

    def __init__(
        self, tokenizer: Any, template: Any = None, report: Callable[[str], object] = lambda text: None
    ) -> None:
        self._tokenizer = TokenizerCopy(tokenizer)
        self._report = report
        self._blocks: list[_Block] = []
        self._recent: dict[bytes, tuple[int, ...]] = {}
        self._use(template)

    def _use(self, template: Any) -> None:
        self._template = Template.parse(template)
        self._frames: dict[str, Frame] = {}
        self._hash = hashlib.blake2b(repr(self._template).encode(), digest_size=_DIGEST)

    def under(self, template: Any) -> Prompts:
        """Prompts under another template, which share memory and tokenizer with these."""
        other = copy.copy(self)
        other._use(template)
        return other

    def __call__(self, task: Task) -> tuple[int, ...]:
        key = self._key(task)
        for block in self._blocks:
            (at,), (there,) = block.find(np.array([key], dtype=block.keys.dtype))
            if there:
                start = block.starts[at]
                return tuple(block.ids[start : start + block.lengths[at]].tolist())
        # The lock of the tokenizer guards `_recent`, too: plans ask from other threads.
        with self._tokenizer as tokenizer:
            if key not in self._recent:
                # A dict keeps the order of insertion: the first key is the oldest.
                if len(self._recent) == RECENT:
                    del self._recent[next(iter(self._recent))]
                self._recent[key] = tuple(render_prompts([task], tokenizer, self._template)[0])
            return self._recent[key]

    def lengths(self, tasks: Sequence[Task]) -> np.ndarray:
        """Tokens of each task's prompt, int32 [N]. Prompts that are new are encoded and kept. DataError names a task
        whose prompt cannot be rendered."""
        keys = np.fromiter(map(self._key, tasks), dtype=f"S{_DIGEST}", count=len(tasks))
        lengths, missing = self._kept_lengths(keys)
        if missing.any():
            where = np.flatnonzero(missing)
            # `unique` sorts by key; the positions are sorted back, so that an error names the first bad task of the
            # data.
            _, first = np.unique(keys[where], return_index=True)  # a prompt may be that of several tasks
            where = where[np.sort(first)]
            self._blocks.append(self._encoded(keys[where], [tasks[i] for i in where.tolist()]))
            lengths, _ = self._kept_lengths(keys)
        return lengths

    def _kept_lengths(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the prompts of these keys, int32 [N], and bool [N] for which are not kept."""
        lengths = np.zeros(len(keys), dtype=np.int32)
        missing = np.ones(len(keys), dtype=bool)
        for block in self._blocks:
            at, there = block.find(keys)
            lengths[there] = block.lengths[at[there]]
            missing &= ~there
        return lengths, missing

    def demonstration_lengths(self, tasks: Sequence[Task]) -> np.ndarray:
        """Tokens of each task's demonstration, int32 [N], 0 where it has none. They are not kept."""
        lengths = np.zeros(len(tasks), dtype=np.int32)
        where = [number for number, task in enumerate(tasks) if task.demonstration]
        batches = self._in_batches([tasks[number] for number in where], render_demonstrations, "demonstrations")
        lengths[where] = [len(ids) for batch in batches for ids in batch]
        return lengths

    def _encoded(self, keys: np.ndarray, tasks: Sequence[Task]) -> _Block:
        """Encode the prompts of tasks, which all differ."""
        ids = np.empty(0, dtype=np.int32)  # resized in place: a million prompts are not in memory twice
        lengths = np.empty(len(tasks), dtype=np.int32)
        done = 0
        used = 0

        render = functools.partial(render_prompts, template=self._template)
        for encoded in self._in_batches(tasks, render, "prompts"):
            counts = [len(prompt) for prompt in encoded]
            lengths[done : done + len(counts)] = counts
            done += len(counts)
            end = used + sum(counts)
            if end > len(ids):
                # `refcheck`: nothing else refers to the array, which numpy cannot tell for sure (a debugger may).
                ids.resize(int(end * GROWTH), refcheck=False)
            ids[used:end] = np.fromiter(chain.from_iterable(encoded), dtype=np.int32, count=end - used)
            used = end
        self._warn_of_unknown(tasks, lengths, ids[:used])
        ids.resize(used, refcheck=False)  # what it had grown beyond the last prompt is given back
        # `find` looks keys up by bisection. The ids stay where they are, and `starts` goes with the keys.
        order = np.argsort(keys)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        return _Block(keys[order], starts[order], lengths[order], ids)

    def _warn_of_unknown(self, tasks: Sequence[Task], lengths: np.ndarray, ids: np.ndarray) -> None:
        """Warn of prompts with the unknown token, which stands for whatever the tokenizer has no token for."""
        with self._tokenizer as tokenizer:
            unknown = getattr(tokenizer, "unk_token_id", None)
            places = np.flatnonzero(ids == unknown) if unknown is not None else np.empty(0, dtype=np.int64)
            if not len(places):
                return
            # Some tokenizers have one token as the unknown one and as the end of a text or padding, which is no slip.
            if unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
                return
            # [prompts]: the prompt that each place lies in is the first one that ends behind it.
            prompts = np.unique(np.searchsorted(np.cumsum(lengths), places, side="right"))
            task = tasks[int(prompts[0])]
            text = task.prompt if isinstance(task.prompt, str) else "".join(str(m["content"]) for m in task.prompt)
            lost = [c for c in dict.fromkeys(text) if unknown in tokenizer.encode(c, add_special_tokens=False)]
        named = f" ({', '.join(map(repr, lost[:_LOST]))})" if lost else ""
        log.warning(
            "%d of %d prompts have text that the tokenizer has no token for, the first is %s%s: the model reads all of "
            "it as %s. Of a model from scratch, model.scratch.alphabet and `words` are what it can read",
            len(prompts),
            len(tasks),
            task.named,
            named,
            tokenizer.unk_token,
        )

    def _in_batches(
        self, tasks: Sequence[Task], render: Callable[[Sequence[Task], Any], list[list[int]]], what: str
    ) -> Iterator[list[list[int]]]:
        """The token ids that `render` gives for each part of the tasks. Says how far it is, where it takes seconds."""
        done = tokens = 0
        begun = reported = time.monotonic()
        for batch in _batches(tasks):
            with self._tokenizer as tokenizer:
                encoded = render(batch, tokenizer)
            yield encoded
            done += len(batch)
            tokens += sum(map(len, encoded))
            now = time.monotonic()
            if now - reported > PROGRESS_SECONDS and done < len(tasks):
                self._report(f"encoded {done:,} of {len(tasks):,} {what}")
                reported = now
        seconds = time.monotonic() - begun
        if seconds > PROGRESS_SECONDS:
            self._report(f"encoded {len(tasks):,} {what} ({tokens:,} tokens) in {seconds:.0f} s")

    def _key(self, task: Task) -> bytes:
        """A key of prompt and template: not the id, since a task may be rewritten, and two sets may share a prompt."""
        # The hash of the template goes before that of every prompt: it is computed once.
        digest = self._hash.copy()
        # `repr` tells a text from a chat with the same words, and escapes what UTF-8 refuses.
        digest.update(repr(task.prompt).encode())
        return digest.digest()

    def reply(self, task: Task, text: str, role: str, end: int | None) -> tuple[int, ...]:
        """The token ids that put `text`, said by `role`, behind a turn of the policy's in the task's context.

        `end` is the end-of-turn token that the policy sampled, None where a stop string ended the turn. ConfigError
        where the prompt is a chat and its template takes no such message.
        """
        is_text = isinstance(self._template.apply(task.prompt), str)
        with self._tokenizer as tokenizer:
            if is_text:
                return tuple(reply_ids(text, tokenizer, None, end))
            if role not in self._frames:
                self._frames[role] = frame_of(tokenizer, role, self._template.options)
            return tuple(reply_ids(text, tokenizer, self._frames[role], end))


def _batches(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    """The tasks in order, in parts that are encoded together."""
    begin = characters = 0
    for number, task in enumerate(tasks):
        if isinstance(task.prompt, str):
            prompt = task.prompt
        else:
            prompt = repr(task.prompt)
        size = len(prompt) + len(task.demonstration or "")
        # At least one prompt in each part, however long it is.
        if number > begin and (number - begin == BATCH_PROMPTS or characters + size > BATCH_CHARACTERS):
            yield tasks[begin:number]
            begin = number
            characters = 0
        characters += size
    if begin < len(tasks):
        yield tasks[begin:]
