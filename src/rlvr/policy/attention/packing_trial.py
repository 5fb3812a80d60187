"""Packed rows tried on a model.

That a model computes packed rows is not assumed from its name but tried, once, forward and backward, on a few tokens
that reach over its sliding window.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvr.policy.attention.packed_rows import Spans, hook, unhook


@dataclass(frozen=True)
class Packing:
    """Packed rows that a model can compute, and the reason where it cannot."""

    packs: bool
    shares: bool
    reason: str = ""


def unpackable_layers(config: Any) -> set[str]:
    """The kinds of layers of a model, by its text configuration, that no packed row is computed by."""
    return set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}


def try_packing(model: Any, hidden_states: Callable[..., torch.Tensor], tolerance: float) -> Packing:
    """Hook `model` and compare a packed row with shared prefixes to the rows apart; where they differ, unhook it again.

    `hidden_states(input_ids, position_ids, spans)` runs the model; `tolerance` is relative to the largest of them.
    """
    special = unpackable_layers(model.config.get_text_config())
    if special:
        return Packing(False, False, f"its layers are of type {', '.join(sorted(special))}")
    hook(model)
    trouble = _disagree(hidden_states, model, tolerance)
    if trouble:
        unhook(model)
    return Packing(not trouble, not trouble, trouble)


def _disagree(hidden_states: Callable[..., torch.Tensor], model: Any, tolerance: float) -> str:
    """Why a packed row of three short rollouts is not computed as they are apart; empty where it is."""
    try:
        with torch.inference_mode(False), narrowed(model.config.get_text_config(), WINDOW):
            trial = _Trial.of(model)
            want, of_want = trial.computed(hidden_states, packed=False)
            got, of_got = trial.computed(hidden_states, packed=True)
    # Wide, since the model may be any code from the hub: whatever it fails with, rows are padded and the log says why.
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        return f"a packed row fails in it ({type(error).__name__}: {str(error)[:200]})"
    if not _near(got, want, tolerance):
        return (
            "a packed row does not give it the hidden states of separate rows (it carries a state along the row, "
            "perhaps)"
        )
    if not all(_near(one, other, ROUNDINGS * tolerance) for one, other in zip(of_got, of_want, strict=True)):
        return "a packed row does not give it the gradients of separate rows"
    return ""


def _near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """True if the largest difference is at most `tolerance` times the largest number."""
    return float((got - want).abs().max()) <= tolerance * float(want.abs().max())


@contextlib.contextmanager
def narrowed(config: Any, window: int) -> Iterator[None]:
    """Inside, a model with this text configuration that has a sliding window has one of at most `window` tokens.

    Masks are made by the configuration, at each pass.
    """
    before = getattr(config, "sliding_window", None)
    if before is None:
        yield
        return
    config.sliding_window = min(before, window)
    try:
        yield
    finally:
        config.sliding_window = before


ROUNDINGS = 4
"""Gradients may differ by so many times as much as hidden states: they were rounded in both passes."""
WINDOW = 4
"""Sliding window of the trial."""
# Every run but the second is as long as the window or longer, so that windows cut within it; the second is shorter, so
# that a window reaches from the runs that continue it through it into the first.
LENGTHS = (6, 2, 5, 4, 7)
CONTEXTS = (-1, 0, 1, 1, 0)
"""A prefix, a trunk that continues it and is continued by two runs, and one more run that continues the prefix."""
ROWS = ((0, 1, 2), (0, 1, 3), (0, 4))
"""The runs of each rollout."""


@dataclass(frozen=True)
class _Trial:
    """Three rollouts, in one packed row of N tokens and in rows of their own."""

    model: Any
    spans: Spans
    ids: torch.Tensor
    """int64 [N]: the tokens of the packed row"""
    places: torch.Tensor
    """int64 [3, L]: the place in the packed row of each token of each rollout, padded on the right with the first"""
    first: torch.Tensor
    """int64 [N]: of each token of the packed row a place among the 3 x L"""
    real: torch.Tensor
    """bool [3, L], false for padding"""

    @classmethod
    def of(cls, model: Any) -> _Trial:
        weight = model.get_input_embeddings().weight
        device = weight.device
        spans = Spans(np.asarray(LENGTHS), np.asarray(CONTEXTS), device)
        start = spans.start
        rows = [np.concatenate([np.arange(start[s], start[s] + LENGTHS[s]) for s in runs]) for runs in ROWS]
        longest = max(map(len, rows))
        places = np.zeros((len(rows), longest), dtype=np.int64)
        real = np.zeros((len(rows), longest), dtype=bool)
        for row, own in enumerate(rows):
            places[row, : len(own)] = own
            real[row, : len(own)] = True
        first = np.asarray([np.flatnonzero((places == n) & real)[0] for n in range(sum(LENGTHS))])
        # Any ids that differ would do; modulo the vocabulary they exist.
        ids = (torch.arange(sum(LENGTHS), device=device) * 7 + 3) % weight.shape[0]
        put = [torch.from_numpy(values).to(device) for values in (places, first, real)]
        return cls(model, spans, ids, *put)

    def computed(
        self, hidden_states: Callable[..., torch.Tensor], packed: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(hidden states [N, H] in the order of the packed row, gradients of a weighted sum of them).

        The gradients are those of the embedded tokens [N, H], which need the backward pass of every layer, and of all
        weights that are vectors, side by side: no gradient of a matrix is made.
        """
        steps = torch.arange(self.places.shape[1], device=self.ids.device).expand(len(self.places), -1)
        inputs: tuple[Any, ...] = (self.ids[self.places], steps)
        if packed:
            positions = torch.as_tensor(self.spans.positions, device=self.ids.device)
            inputs = (self.ids[None], positions[None], self.spans)
        with torch.enable_grad(), _embedded(self.model) as embedded:
            states = hidden_states(*inputs).float().flatten(0, 1)
            if not packed:
                states = states[self.first]
            # Any weights would do that differ from token to token and from channel to channel.
            weights = torch.cos(torch.arange(states.numel(), device=states.device)).view_as(states)
            vectors = [p for p in self.model.parameters() if p.requires_grad and p.ndim == 1]
            found = torch.autograd.grad((weights * states).sum(), [embedded[0], *vectors], allow_unused=True)
        of_tokens, *of_vectors = (
            torch.zeros_like(x) if gradient is None else gradient
            for gradient, x in zip(found, [embedded[0], *vectors], strict=True)
        )
        of_tokens = of_tokens.float().flatten(0, 1)
        if not packed:
            # Each copy of a shared token has a part of its gradient, and padding has none.
            own = of_tokens * self.real.flatten()[:, None]
            of_tokens = torch.zeros_like(states).index_add_(0, self.places.flatten(), own)
        # Side by side, because some are 0 but for rounding (a bias of the keys).
        together = torch.cat([of_tokens.new_zeros(1), *(gradient.float() for gradient in of_vectors)])
        return states.detach(), [of_tokens.detach(), together]


@contextlib.contextmanager
def _embedded(model: Any) -> Iterator[list[torch.Tensor]]:
    """Inside, the list gets the output of the model's token embedding, of which gradients may be asked."""
    made: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        made.append(output.detach().requires_grad_())
        return made[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield made
    finally:
        handle.remove()
