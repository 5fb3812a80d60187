"""ROVER: fit the log-ratio to the value that a uniformly random policy would have."""

from __future__ import annotations

from dataclasses import dataclass

from rlvr.components import Loss
from rlvr.core.needs import CURRENT, PROXIMAL, Need
from rlvr.core.schedules import Scalar
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch, next_of_sequence
from rlvr.registry import register


@register("loss", "rover")
@dataclass(frozen=True)
class RandomPolicyValueLoss(Loss):
    """(Q - sg[A + beta Q'])^2 per token, Q = temperature (log pi - log pi_proximal).

    Random policy valuation (He et al. 2025, arXiv 2509.24981; checked against the authors' code): A is the centred
    reward at every token (advantage `group` with scale none or std), and Q' the mean of Q over the whole vocabulary at
    the response's next trained token, 0 after its last. On a batch's first optimizer step the gradient is -2
    temperature times that of A log pi. Later steps compare with the policy as it was when the update began, as
    `algorithm.decoupled` does."""

    temperature: Scalar = 1.0
    """Scale from log-ratio to value, rho in the paper; above 0."""
    beta: Scalar = 1.0
    """Weight of the next token's value; 0 fits the log-ratio to the advantage alone."""
    average: Average = "tokens"
    """tokens: every token weighs the same; sequences: every response; groups: every group; constant: divide by a fixed
    length."""
    constant: int | None = None
    """Length of the constant average in tokens; null: rollout.max_new_tokens."""

    needs = frozenset(
        {Need("logprobs", grad=True), Need("logprobs", PROXIMAL)}
        | {Need(name, model) for name in ("mean_logit", "logsumexp") for model in (CURRENT, PROXIMAL)}
    )
    degenerate_on_policy = True

    def __call__(self, tokens: TokenBatch, over: Denominators) -> LossTerm:
        statistics = tokens.statistics
        scale = float(self.temperature)
        # [T] each: the mean over the vocabulary of log pi, since log pi(v) = logit(v) - logsumexp.
        now, before = (
            statistics["mean_logit", model] - statistics["logsumexp", model] for model in (CURRENT, PROXIMAL)
        )
        # [T] Q' = temperature x mean over v of (log pi(v) - log pi_proximal(v)) at the next token: its value under a
        # policy that chooses uniformly. Detached, as a target is.
        following = scale * next_of_sequence((now - before).detach(), tokens.sequence)
        target = tokens.advantage + float(self.beta) * following
        log_ratio = tokens.logprobs - tokens.proximal_logprobs
        ratio = log_ratio.detach().exp()
        metrics = {"ratio/mean": ratio, "ratio/max": ratio}
        return LossTerm(tokens.average((scale * log_ratio - target).square(), self.average, over), metrics)
