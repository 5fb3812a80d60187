"""Statistics that a component may ask of a forward pass, and of which model. The learner computes only declared
ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CURRENT = "current"
"""The policy as it is now."""
PROXIMAL = "proximal"
"""The policy in the denominator of the policy ratio. On a batch's first optimizer step it is the current policy,
detached. On later steps it is the policy that sampled, or, where the objective has a correction or is decoupled, the
policy at the start of the update."""
BEHAVIOUR = "behaviour"
"""The policy that sampled, by the log-probs recorded then. A component that needs them is refused tokens that have
none."""
REFERENCE = "reference"
"""The snapshot of the policy at the start of the stage."""

Statistic = Literal[
    "logprobs",
    "entropy",
    "pair_logprobs",
    "logsumexp",
    "mean_logit",
    "max_logit",
    "sum_squared_probs",
    "top_k",
]
"""Statistics of the next-token distribution, which is the softmax of the logits divided by the token's temperature.

logprobs: of the tokens themselves. pair_logprobs: of other token ids at the same positions, [T, K]. logsumexp,
mean_logit and max_logit are of the logits after that division, over the whole vocabulary of the LM head.
sum_squared_probs is 1 for a certain token and 1 / V for a uniform distribution. top_k: log-probs of the k most likely
tokens, [T, k], best first."""

SEVERAL_PER_TOKEN: frozenset[Statistic] = frozenset({"pair_logprobs", "top_k"})
"""The statistics that are more than one number per token."""


@dataclass(frozen=True)
class Need:
    """One statistic at the trained tokens.

    `model` is current, proximal, behaviour, reference or a named model; `grad` says whether the component
    differentiates it. `k` is how many tokens top_k needs; where components ask for different k, all get the largest,
    and read their first k columns.
    """

    statistic: Statistic
    model: str = CURRENT
    grad: bool = False
    k: int = 0

    def __post_init__(self) -> None:
        # Needs are compared and merged as values: two that mean the same must be equal.
        if (self.k > 0) != (self.statistic == "top_k"):
            raise ValueError(
                f"k is {self.k} for the statistic {self.statistic!r}: top_k needs k >= 1, the others take none"
            )


LOGPROBS = Need("logprobs")
LOGPROBS_WITH_GRADIENT = Need("logprobs", grad=True)
ENTROPY = Need("entropy")
PROXIMAL_LOGPROBS = Need("logprobs", PROXIMAL)
BEHAVIOUR_LOGPROBS = Need("logprobs", BEHAVIOUR)
