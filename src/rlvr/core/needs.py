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

Statistic = Literal["logprobs", "entropy", "logsumexp", "mean_logit", "sum_squared_probs"]
"""Statistics of the next-token distribution, which is the softmax of the logits divided by the token's temperature; one
number per token.

logprobs: of the tokens themselves. logsumexp and mean_logit are of the logits after that division, over the whole
vocabulary of the LM head. sum_squared_probs is 1 for a certain token and 1 / V for a uniform distribution."""


@dataclass(frozen=True)
class Need:
    """One statistic at the trained tokens.

    `model` is current, proximal, behaviour or reference; `grad` says whether the component differentiates it.
    """

    statistic: Statistic
    model: str = CURRENT
    grad: bool = False


LOGPROBS = Need("logprobs")
LOGPROBS_WITH_GRADIENT = Need("logprobs", grad=True)
ENTROPY = Need("entropy")
PROXIMAL_LOGPROBS = Need("logprobs", PROXIMAL)
BEHAVIOUR_LOGPROBS = Need("logprobs", BEHAVIOUR)
