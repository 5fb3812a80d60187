"""A policy against the Bayesian posterior that KL-regularised reinforcement learning aims at, by enumeration.

Korbak, Perez and Buckley 2022, "RL with KL penalties is better viewed as Bayesian inference", arXiv 2205.11275: the
optimum of J(pi) = E_pi[r] - beta KL(pi || pi0) is pi*(x) = pi0(x) exp(r(x) / beta) / Z (eq. 5 and 6), and
J(pi) = beta log Z - beta KL(pi || pi*) (eq. 7 with its constant). All responses to a prompt are enumerated, so that the
expectations are sums, not estimates: a few tokens of a small vocabulary, or one token of a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvr.analysis.analysis_table import AnalysisTable
from rlvr.errors import ConfigError
from rlvr.policy import Policy

MOST = 400_000
"""Most responses to one prompt: more than one token of the largest vocabularies has, and minutes of a verifier."""
# A choice that bounds memory: float32 logits of 64 rows of 150,000 tokens are 40 MB.
ROWS = 64
"""Prefixes in one forward pass."""


def responses(policy: Policy, prompt: Sequence[int], longest: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every response of at most `longest` tokens with its log-prob, in nats, under sampling at temperature 1.

    A response ends with an end token (`policy.end_ids`) or at `longest`. The order is the same for all policies of one
    vocabulary. ConfigError where there are more than `MOST`.
    """
    ends = policy.end_ids
    open_prefixes: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    count = 0
    for depth in range(1, longest + 1):
        deeper = []
        for begin in range(0, len(open_prefixes), ROWS):
            block = open_prefixes[begin : begin + ROWS]
            logprobs = _next_logprobs(policy, [[*prompt, *prefix] for prefix, _ in block])  # [R, V]
            count += logprobs.size
            if count > MOST:
                raise ConfigError(
                    f"there are more than {MOST} responses of at most {longest} tokens of a vocabulary of "
                    f"{logprobs.shape[1]}: set a smaller rollout.max_new_tokens"
                )
            for (prefix, before), row in zip(block, logprobs, strict=True):
                for token, logprob in enumerate(row.tolist()):
                    response = ((*prefix, token), before + logprob)
                    if depth == longest or token in ends:
                        yield response
                    else:
                        deeper.append(response)
        open_prefixes = deeper


@torch.no_grad()
def _next_logprobs(policy: Policy, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Log-probs of the token after each row, float64 [R, V]; rows are of one length."""
    ids = torch.tensor(rows, device=policy.device)  # [R, L]
    positions = torch.arange(ids.shape[1], device=policy.device).expand_as(ids)
    logits = policy.own_logits(ids, positions)[:, -1]  # [R, V]
    return logits.double().log_softmax(-1).cpu().numpy()


@dataclass(frozen=True)
class PosteriorGap:
    """One policy on one prompt, in nats, and rewards in their own unit."""

    reward: float
    """E_pi[r]."""
    divergence: float
    """KL(pi || pi0)."""
    objective: float
    """J(pi) = E_pi[r] - beta KL(pi || pi0)."""
    bound: float
    """beta log Z, the largest J of any policy."""
    gap: float
    """KL(pi || pi*)."""
    entropy: float
    """Of the response."""


def posterior_of(base: np.ndarray, reward: np.ndarray, beta: float) -> tuple[np.ndarray, float]:
    """Log-probs of pi0 exp(r / beta) / Z, [N], and log Z, from log-probs of pi0 and rewards, [N] each."""
    tilted = base + reward / beta
    top = tilted.max()
    log_z = float(top + np.log(np.exp(tilted - top).sum()))
    return tilted - log_z, log_z


def posterior_gap(policy: np.ndarray, base: np.ndarray, reward: np.ndarray, beta: float) -> PosteriorGap:
    """Compare a policy with the posterior: log-probs of both policies and rewards of all responses, [N] each."""
    posterior, log_z = posterior_of(base, reward, beta)
    share = np.exp(policy)
    expected = float(share @ reward)
    divergence = float(share @ (policy - base))
    return PosteriorGap(
        reward=expected,
        divergence=divergence,
        objective=expected - beta * divergence,
        bound=beta * log_z,
        gap=float(share @ (policy - posterior)),
        entropy=-float(share @ policy),
    )


COLUMNS = ["policy", "E[r]", "KL to base", "J", "beta log Z", "KL to posterior", "largest error", "entropy"]


def posterior_table(
    policies: dict[str, Policy],
    prompts: Sequence[Sequence[int]],
    rewards: Callable[[int, Sequence[tuple[int, ...]]], np.ndarray],
    longest: int,
    beta: float,
) -> AnalysisTable:
    """A row of means over prompts for each policy and for the posterior itself; the first policy is pi0.

    `rewards(n, responses)` gives the rewards of responses (token ids) to prompt n, float64. `largest error` is the
    largest |J - beta log Z + beta KL(pi || pi*)| over prompts, which is 0 but for rounding. ConfigError where beta is
    not above 0, or the policies have different vocabularies.
    """
    if beta <= 0:
        raise ConfigError(f"beta is {beta}: without a KL term there is no posterior, set --beta above 0")
    found: dict[str, list[PosteriorGap]] = {name: [] for name in [*policies, "posterior"]}
    for number, prompt in enumerate(prompts):
        texts: list[tuple[int, ...]] = []
        logprobs: dict[str, np.ndarray] = {}
        for name, policy in policies.items():
            enumerated = list(responses(policy, prompt, longest))
            tokens = [response for response, _ in enumerated]
            if texts and tokens != texts:
                raise ConfigError(f"{name} has another vocabulary than the first policy")
            texts = tokens
            logprobs[name] = np.asarray([logprob for _, logprob in enumerated])
        base = next(iter(logprobs.values()))
        reward = rewards(number, texts)
        logprobs["posterior"] = posterior_of(base, reward, beta)[0]
        for name, of_policy in logprobs.items():
            found[name].append(posterior_gap(of_policy, base, reward, beta))
    table = AnalysisTable(COLUMNS)
    for name, gaps in found.items():
        table.rows.append([name, *_means(gaps, beta)])
    table.notes.append(f"beta = {beta:g}; means over {len(prompts)} prompts, all of whose responses were enumerated.")
    return table


def _means(gaps: Sequence[PosteriorGap], beta: float) -> list[float]:
    error = max(abs(gap.objective - gap.bound + beta * gap.gap) for gap in gaps)
    names = ("reward", "divergence", "objective", "bound", "gap")
    means = [float(np.mean([getattr(gap, name) for gap in gaps])) for name in names]
    return [*means, error, float(np.mean([gap.entropy for gap in gaps]))]
