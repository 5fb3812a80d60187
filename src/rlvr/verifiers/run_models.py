"""The models of a run, as verifiers ask for them: frozen ones by their names under `models`, and the policy.

Works without torch: what is loaded is behind the protocol, which rlvr.run.run_models implements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rlvr.config import FrozenModelConfig
    from rlvr.policy.frozen_model import FrozenModel, Head

POLICY = "policy"
"""The name of the model that is trained."""


@dataclass(frozen=True)
class SampledReply:
    """Reply of a model of the run to a chat."""

    text: str
    version: int
    """Of the weights that sampled its first token; 0 for a frozen model."""
    truncated: bool
    first_token: Mapping[str, float] = field(default_factory=dict)
    """The likeliest first tokens as text -> log-prob, as many as were asked for."""
    tokens: tuple[int, int] = (0, 0)
    """Tokens of the prompt and of the reply."""


class ChatSampler(Protocol):
    """Samples replies with a model of this run."""

    identity: str
    """The model, for a cache of replies: the same only where the weights are, but for their version."""
    seed: int
    """The run's seed."""

    @property
    def version(self) -> int:
        """The version of the weights that it samples with now; 0 for a frozen model."""

    async def sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        alternatives: int = 0,
        template: Mapping[str, Any] | None = None,
    ) -> SampledReply:
        """The reply to a chat; `template` are options of its chat template. DataError where the chat is too long."""


class RunModels(Protocol):
    """The models of a run. Every method raises ConfigError for a name that is not one of them."""

    def described(self, name: str) -> FrozenModelConfig:
        """The section of a frozen model."""

    def loaded(self, name: str, head: Head) -> FrozenModel:
        """A frozen model from a path, loaded once for each `head`. ConfigError where it cannot be loaded."""

    def sampler(self, name: str) -> ChatSampler:
        """Samples with the policy, or with a frozen model from a path. ConfigError where nothing samples here."""
