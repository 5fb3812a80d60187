"""What a tile of logits adds to the statistics of its tokens, and what the statistics' gradients make of the tile.

With p the softmax of a token's logits z, the gradient of every statistic in z has the form

    p (a + b log p + c p) + d + (g at a few token ids)

with one number a, b, c, d per token, so that all that were asked for cost one pass.
"""

from __future__ import annotations

import torch

from rlvr.policy.head_tiles import ENTROPY, LSE, MAXIMUM, MEAN, NAMES, PAIRS, SQUARES, TOP, Plan

LOWEST = -1e30
"""Stands for a log-probability of minus infinity where it is multiplied by a probability of zero."""


class Running:
    """Sums over the vocabulary so far, for every token, relative to its largest logit so far."""

    def __init__(self, plan: Plan, ids: torch.Tensor | None, tokens: int, like: torch.Tensor) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return like.new_zeros(tokens, *shape)

        asked = plan.asked
        self.vocabulary = plan.vocabulary
        self.ids = ids if PAIRS in asked else None
        self.maximum = torch.full_like(zeros(), -torch.inf)
        self.mass = zeros()
        self.entropy = zeros() if ENTROPY in asked else None
        self.squares = zeros() if SQUARES in asked else None
        self.total = zeros() if MEAN in asked else None
        self.chosen = zeros(self.ids.shape[1]) if self.ids is not None else None
        self.top = torch.full_like(zeros(plan.top), -torch.inf) if plan.top else None
        self.top_ids = torch.zeros_like(self.top, dtype=torch.int64) if self.top is not None else None

    def add(self, rows: slice, part: slice, z: torch.Tensor, scratch: torch.Tensor) -> None:
        """Count a tile, which is left relative to the largest logits; `scratch` is overwritten."""
        self._follow(rows, part, z)
        first, largest = part.start == 0, z.amax(1)
        shift = None
        if not first:
            before = self.maximum[rows]
            largest = torch.maximum(before, largest)
            shift = _anchor(before) - _anchor(largest)
        self.maximum[rows] = largest
        z.sub_(_anchor(largest)[:, None])
        weight = torch.exp(z, out=scratch)
        mass = weight.sum(1)
        faded, old = None if shift is None else shift.exp(), self.mass[rows]
        if self.squares is not None:
            squares = torch.linalg.vector_norm(weight, dim=1).square()
            self.squares[rows] = squares if faded is None else squares + faded.square() * self.squares[rows]
        if self.entropy is not None:  # last, as it overwrites the weights
            entropy = weight.mul_(z.clamp_(min=LOWEST)).sum(1)
            if shift is not None and faded is not None:
                entropy += faded * (self.entropy[rows] + shift * old)
            self.entropy[rows] = entropy
        self.mass[rows] = mass if faded is None else mass + faded * old

    def _follow(self, rows: slice, part: slice, z: torch.Tensor) -> None:
        if self.total is not None:
            self.total[rows] += z.sum(1)
        if self.ids is not None and self.chosen is not None:
            if self.vocabulary == z.shape[1]:
                self.chosen[rows] = z.gather(1, self.ids[rows])
            else:
                inside, local = within(self.ids[rows], part)
                self.chosen[rows] = torch.where(inside, z.gather(1, local), self.chosen[rows])
        if self.top is not None and self.top_ids is not None:
            values, ids = z.topk(min(self.top.shape[1], z.shape[1]), dim=1)
            values, ids = torch.cat([self.top[rows], values], 1), torch.cat([self.top_ids[rows], ids + part.start], 1)
            self.top[rows], best = values.topk(self.top.shape[1], dim=1)
            self.top_ids[rows] = ids.gather(1, best)


def _anchor(largest: torch.Tensor) -> torch.Tensor:
    """What logits are taken relative to: the largest, or a finite number where all are minus infinity."""
    return largest.clamp(min=torch.finfo(largest.dtype).min)


def within(ids: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token ids are among some vocabulary entries, and their places there (0 for the others)."""
    inside = (ids >= part.start) & (ids < part.stop)
    return inside, torch.where(inside, ids - part.start, 0)


def finish(plan: Plan, running: Running) -> tuple[list[torch.Tensor | None], tuple[torch.Tensor, ...]]:
    """The statistics in the order of NAMES, with the ids of the top k; and what the backward pass needs of the sums."""
    asked, anchor = plan.asked, _anchor(running.maximum)
    log_mass = running.mass.log()
    entropy = None if running.entropy is None else log_mass - running.entropy / running.mass
    squares = None if running.squares is None else running.squares / running.mass.square()

    def logprobs(values: torch.Tensor) -> torch.Tensor:
        return values - anchor[:, None] - log_mass[:, None]

    top = running.top[:, : plan.top_k] if TOP in asked and running.top is not None else None
    values = [
        None if running.chosen is None else logprobs(running.chosen),
        entropy,
        anchor + log_mass if LSE in asked else None,
        None if running.total is None else running.total / plan.vocabulary,
        running.maximum if MAXIMUM in asked else None,
        squares,
        None if top is None else logprobs(top),
        None if top is None or running.top_ids is None else running.top_ids[:, : plan.top_k].clone(),
    ]
    return values, (anchor, log_mass, entropy, squares)  # type: ignore[return-value]


class Slope:
    """The gradient of a tile of logits, from those of the statistics."""

    def __init__(self, plan, gradients, ids, state, factor):  # type: ignore[no-untyped-def]
        given = dict(zip(NAMES, gradients, strict=False))
        self.plan, self.factor = plan, factor
        self.anchor, self.log_mass, entropy, squares = state
        inner = factor[:, 0] if plan.cap is None else factor[:, 0] * (plan.scale / plan.cap)
        a = torch.zeros_like(inner)
        self.hot: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.b = self.c = self.d = None
        for name, where in ((PAIRS, ids[0]), (TOP, ids[1])):
            if (g := given[name]) is not None:
                a = a - g.sum(1)
                self.hot.append((where[:, : g.shape[1]], g * inner[:, None]))
        if (g := given[MAXIMUM]) is not None:
            self.hot.append((ids[1][:, :1], (g * inner)[:, None]))
        if (g := given[LSE]) is not None:
            a = a + g
        if (g := given[ENTROPY]) is not None:
            a, self.b = a - g * entropy, (-g * inner)[:, None]
        if (g := given[SQUARES]) is not None:
            a, self.c = a - 2 * g * squares, (2 * g * inner)[:, None]
        if (g := given[MEAN]) is not None:
            self.d = (g * inner / plan.vocabulary)[:, None]
        self.a = (a * inner)[:, None]

    def of(self, rows: slice, part: slice, z: torch.Tensor, scratch: torch.Tensor, relative: bool) -> torch.Tensor:
        """The gradient of the head's products in a tile, in `scratch`; z is overwritten, unless it is the kept one."""
        flat = None if self.plan.cap is None else (z / self.factor[rows]).square_().neg_().add_(1)
        if relative:
            z = z - self.log_mass[rows, None]
        else:
            z.sub_(self.anchor[rows, None]).sub_(self.log_mass[rows, None])  # the bits of the forward pass
        p = torch.exp(z, out=scratch)
        if self.b is None and self.c is None:
            p.mul_(self.a[rows])
        else:
            inside = z.clamp_(min=LOWEST).mul_(self.b[rows]) if self.b is not None else z.zero_()
            if self.c is not None:
                inside.addcmul_(p, self.c[rows])
            p.mul_(inside.add_(self.a[rows]))
        if self.d is not None:
            p.add_(self.d[rows])
        for ids, g in self.hot:
            if p.shape[1] == self.plan.vocabulary:
                p.scatter_add_(1, ids[rows], g[rows])
            else:
                here, local = within(ids[rows], part)
                p.scatter_add_(1, local, torch.where(here, g[rows], 0))
        return p if flat is None else p.mul_(flat)
