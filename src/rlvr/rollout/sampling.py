"""Drawing tokens from logits: truncation, seeded inverse-CDF sampling, log-probs of the sampling distribution.

Invariant: a row's token depends on its own logits, options and uniform number only, so it does not change with the batch.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

BLOCK = 256
"""Tokens of a vocabulary that are summed before the search: running sums over all of them cost more than the model's head."""


def uniforms(seed: int, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1), float64, that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


class Chooser:
    """Draws the next token of every row by its options.

    `options` is float32 [R, 4]: temperature, top_k, top_p and min_p of each row. What none of the rows asks for is not computed.
    """

    def __init__(self, options: np.ndarray, device: torch.device) -> None:
        temperature, top_k, top_p, min_p = options.T
        self._greedy = bool((temperature == 0).any())
        self._warm = bool((temperature != 1).any())
        self._truncates = bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
        self._temperature, *self._cuts = torch.from_numpy(options.T.copy()).to(device).unbind()

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [R] and their log-probs float32 [R], from logits [R, V] and uniforms [R]."""
        if not self._truncates and not self._greedy:
            return draw(logits / self._temperature[:, None] if self._warm else logits, None, uniform)
        if self._truncates:
            # As vLLM does, truncation is of the distribution at the temperature.
            scale = torch.where(self._temperature == 0, 1.0, self._temperature)[:, None]
            logits = truncate(logits / scale, *self._cuts) * scale
        return draw(logits, self._temperature, uniform)


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] with -inf for the tokens that top-k, top-p and min-p (each [R]) leave out; never all of a row.

    top_k 0, top_p 1 and min_p 0 leave a row as it is. min-p keeps tokens at least p times as likely as the likeliest
    (Nguyen et al. 2024); top-p keeps the smallest set of most likely tokens whose probability, among those that min-p
    and top-k left, reaches p (Holtzman et al. 2020). The order is vLLM's.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    keep[:, 0] = True
    left = probabilities * keep
    left = left / left.sum(-1, keepdim=True)
    keep &= (left.cumsum(-1) - left < top_p[:, None]) | (top_p[:, None] >= 1)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(~keep, -torch.inf))


def draw(
    logits: torch.Tensor, temperature: torch.Tensor | None, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R] and their log-probs float32 [R], from logits [R, V], temperatures [R] (None: 1) and uniforms [R].

    Temperature 0 takes the likeliest token and gives its log-prob at temperature 1.
    """
    if temperature is None:
        probabilities = logits.softmax(-1)
        tokens = _inverse_cdf(probabilities, uniform)
    else:
        greedy = temperature == 0
        probabilities = (logits / torch.where(greedy, 1.0, temperature)[:, None]).softmax(-1)
        tokens = torch.where(greedy, logits.argmax(-1), _inverse_cdf(probabilities, uniform))
    return tokens, probabilities.gather(-1, tokens[:, None]).squeeze(-1).log()


def _inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token [R] whose cumulative probability passes the uniform number; never one of probability 0."""
    vocabulary = probabilities.shape[-1]
    if vocabulary <= BLOCK:
        return _first_past(probabilities, uniform)[0].squeeze(-1)
    padded = torch.nn.functional.pad(probabilities, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else probabilities
    blocks = padded.view(len(padded), -1, BLOCK)
    mass = blocks.sum(-1)
    block, wanted, cumulative = _first_past(mass, uniform)
    here = mass.gather(-1, block).double()
    rest = ((wanted - (cumulative.gather(-1, block) - here)) / here).clamp_(0.0, _BELOW_ONE).squeeze(-1)
    block = block.squeeze(-1)
    inside = blocks[torch.arange(len(blocks), device=block.device), block]
    return (block * BLOCK + _first_past(inside, rest)[0].squeeze(-1)).clamp_max_(vocabulary - 1)  # the bound is for NaN


def _first_past(mass: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the running sum of `mass` [R, n] first exceeds `share` [R] of its total, that share of it, each [R, 1], and the
    sum. An entry of mass 0 is never the first: the sum does not grow there."""
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding may take the product to the total itself: the last entry that has mass is then meant.
    wanted = torch.minimum(share[:, None] * total, total.nextafter(_nothing(total.device)))
    place = torch.searchsorted(cumulative, wanted, right=True).clamp_max_(mass.shape[-1] - 1)  # the bound is for NaN
    return place, wanted, cumulative


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=device)


_BELOW_ONE = float(np.nextafter(1.0, 0.0))
