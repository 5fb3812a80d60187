"""Drawing tokens from logits: truncation, seeded inverse-CDF sampling, log-probs of the sampling distribution.

Invariant: a row's token depends on its own logits, options and uniform number only, so it does not change with the batch.
"""

from __future__ import annotations

import torch


def uniforms(seed: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` uniform numbers in [0, 1), float64, that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64).to(device)


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


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [R] and their log-probs float32 [R], from logits [R, V], temperatures [R] and uniforms [R].

    Temperature 0 takes the likeliest token and gives its log-prob at temperature 1.
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
    # The first token whose cumulative probability passes u; right=True never picks a token of probability 0.
    cumulative = logprobs.double().exp().cumsum(-1)
    picked = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, logits.argmax(-1), picked.clamp_max(logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
