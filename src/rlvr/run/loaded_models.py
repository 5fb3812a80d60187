"""The models of a run, as verifiers ask for them: frozen ones, loaded once, and the engine of the policy."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.config import FrozenModelConfig
from rlvr.data.templates import Template, render_prompt
from rlvr.data.tokenizer_copy import TokenizerCopy
from rlvr.errors import ConfigError, nearest
from rlvr.policy.foreign import foreign
from rlvr.policy.frozen_model import FrozenModel, Head, load_frozen
from rlvr.records import Task
from rlvr.rollout import Engine, Sampling
from rlvr.rollout.engine import Request
from rlvr.rollout.hf import HFEngine
from rlvr.verifiers.run_models import POLICY, ChatSampler, SampledReply

Submit = Callable[[Coroutine[Any, Any, Any]], Future[Any]]
"""Runs a coroutine on the event loop of the engines."""


class LoadedModels:
    """Frozen models by their names, each loaded when it is first asked for.

    `policy` samples with the weights that train; None where there is no engine. `submit` runs what samples.
    """

    def __init__(
        self,
        models: Mapping[str, FrozenModelConfig],
        seed: int = 0,
        policy: EngineSampler | None = None,
        submit: Submit | None = None,
    ) -> None:
        self.models = models
        self._seed = seed
        self._policy = policy
        self._submit = submit
        self._loaded: dict[tuple[str, Head], FrozenModel] = {}
        self._samplers: dict[str, EngineSampler] = {}
        self._asked: set[str] = set()

    @property
    def unused(self) -> list[str]:
        """Frozen models that nothing has asked for."""
        return [name for name in self.models if name not in self._asked]

    def described(self, name: str) -> FrozenModelConfig:
        """The section of a frozen model. ConfigError for a name that is not there."""
        if name not in self.models:
            known = ", ".join(self.models) or "none"
            raise ConfigError(f"models: there is no {name!r} (there is {known}){nearest(name, self.models)}")
        self._asked.add(name)
        return self.models[name]

    def loaded(self, name: str, head: Head) -> FrozenModel:
        """A frozen model from a path, loaded once for each `head`. ConfigError where it cannot be loaded."""
        config = self.described(name)
        if config.path is None:
            raise ConfigError(f"models.{name} is at a server, and this needs a model with a `path`")
        if (name, head) not in self._loaded:
            self._loaded[name, head] = load_frozen(name, config, head)
        return self._loaded[name, head]

    def sampler(self, name: str) -> ChatSampler:
        """Samples with the policy, or with a frozen model from a path. ConfigError where nothing samples here."""
        if name == POLICY:
            if self._policy is None:
                raise ConfigError("backend: policy needs the engine of a run, which is not open here")
            return self._policy
        if name not in self._samplers:
            model = self.loaded(name, "causal")
            if self._submit is None:
                raise ConfigError(f"backend: {name} needs the event loop of a run, which is not there")
            # It samples with tensors that nobody publishes to: those of the frozen model itself.
            identity = f"{model.config.path} {model.config.revision} {model.config_hash}"
            engine = HFEngine(model.policy)
            self._samplers[name] = EngineSampler(engine, model.tokenizer, self._submit, self._seed, identity)
        return self._samplers[name]

    def records(self) -> dict[str, dict[str, Any]]:
        """For a checkpoint's manifest: where each model is from and, of one that is loaded, the hash of its
        configuration file."""
        hashes = {name: model.config_hash for (name, _), model in self._loaded.items()}
        rows: dict[str, dict[str, Any]] = {}
        for name, config in self.models.items():
            if config.urls:
                rows[name] = {"url": config.url, "model": config.model}
                continue
            rows[name] = {"path": config.path, "revision": config.revision, "config_hash": hashes.get(name)}
        return rows


@dataclass(eq=False)
class EngineSampler:
    """Replies of an engine to chats, asked for from any event loop."""

    engine: Engine
    tokenizer: Any
    submit: Submit
    seed: int
    identity: str

    def __post_init__(self) -> None:
        self._copy = TokenizerCopy(self.tokenizer)

    @classmethod
    def of_policy(cls, engine: Engine, tokenizer: Any, submit: Submit, seed: int) -> EngineSampler:
        """That of the policy. Versions of its weights are told apart within one process only: another run's version 3
        is another model."""
        return cls(engine, tokenizer, submit, seed, f"policy {secrets.token_hex(8)}")

    @property
    def version(self) -> int:
        """The version of the weights that it samples with now; 0 for a frozen model."""
        return self.engine.version

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
        """The reply to a chat; a tokenizer without a chat template is given its messages as text. DataError where the
        chat fills the engine's context."""
        with self._copy as tokenizer:
            ids = _prompt(tokenizer, messages, template or {})
        sampling = Sampling(max_tokens, temperature)
        request = Request(tuple(ids), sampling, seed, constraint={}, alternatives=alternatives)
        completion = await asyncio.wrap_future(self.submit(self.engine.generate(request)))
        first: dict[str, float] = {}
        with self._copy as tokenizer:
            for token, value in completion.first_tokens.items():
                text = str(tokenizer.decode([token]))
                # Two tokens may have one text.
                first[text] = float(np.logaddexp(first.get(text, -np.inf), value))
        return SampledReply(
            completion.text,
            int(completion.versions[0]) if len(completion.versions) else self.version,
            completion.stop.truncated,
            first,
            (len(ids), len(completion.token_ids)),
        )


def _prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
    """The token ids of a chat, with the assistant's turn opened."""
    around = Template(options=options)
    if not foreign(tokenizer, "chat_template"):
        around = Template(text="{prompt}")
    return render_prompt(Task("judge", [dict(message) for message in messages]), tokenizer, around)
