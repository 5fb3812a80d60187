"""The posterior of a configuration's own model, tasks and verifier, and policies trained from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlvr.analysis.analysis_table import AnalysisTable
from rlvr.analysis.posterior import posterior_table
from rlvr.config import Config, ModelConfig
from rlvr.data import Prompts, load_tasks
from rlvr.distributed.checkpoint import model_folder
from rlvr.errors import ConfigError, DataError
from rlvr.policy import Policy, load_policy
from rlvr.records import Task
from rlvr.run.loaded_models import LoadedModels
from rlvr.verifiers.pool import Verification, VerifierPool

BASE = "base"
"""The name of the row of pi0."""


def model_posterior(config: Config, models: Sequence[str], base: str | None, beta: float, limit: int) -> AnalysisTable:
    """Compare `models` (run folders, checkpoints, folders, hub names) with the posterior of `base` under `config`.

    Without `base` pi0 is the configuration's own model. Tasks are the first `limit` of data.eval or, without it, of
    data.train. ConfigError for settings under which responses are not sampled from the plain distribution or rewards
    are not the verdict's score; DataError for an undecided verdict.
    """
    _refuse(config)
    spec = config.data.train if config.data.eval is None else config.data.eval
    if spec is None:
        raise ConfigError("there are no tasks: set data.eval or data.train")
    split = "train" if config.data.eval is None else "eval"
    tasks = load_tasks(spec, split=split, fields=config.data.fields, limit=limit)
    policies = {BASE: _policy(config, base)}
    policies |= {f"{Path(name).name} ({number})": _policy(config, name) for number, name in enumerate(models, start=1)}
    prompts = Prompts(policies[BASE].tokenizer, config.data.template)
    with VerifierPool() as pool:
        verification = Verification(config.verifier, pool)
        verification.attach(LoadedModels(config.models))
        verification.check(tasks)
        rewards = Rewards(tasks, verification, policies[BASE])
        encoded = [prompts(task) for task in tasks]
        return posterior_table(policies, encoded, rewards, config.rollout.max_new_tokens, beta)


def _refuse(config: Config) -> None:
    rollout = config.rollout
    if (
        (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) != (1.0, 1.0, 0, 0.0)
        or rollout.stop
        or rollout.ignore_eos
    ):
        raise ConfigError(
            "responses are enumerated under the policy's own distribution: leave rollout.temperature, top_p, top_k, "
            "min_p, stop and ignore_eos at their defaults"
        )
    written = [spec.written for spec in config.rewards]
    if written != ["verdict"]:
        raise ConfigError(f"the reward here is the verdict's score alone: set rewards to [verdict], not {written}")


def _policy(config: Config, path: str | None) -> Policy:
    model = config.model
    if path is not None:
        model = ModelConfig.model_validate({**model.model_dump(), "path": str(model_folder(path)), "scratch": None})
    return load_policy(model, config.run.seed)


class Rewards:
    """The verifier's scores of token sequences, each different text judged once for a task."""

    def __init__(self, tasks: Sequence[Task], verification: Verification, policy: Policy) -> None:
        self._tasks = tasks
        self._verification = verification
        self._policy = policy

    def __call__(self, number: int, responses: Sequence[tuple[int, ...]]) -> np.ndarray:
        """The scores [N] of responses to task `number`. DataError for one that is undecided."""
        task = self._tasks[number]
        tokenizer = self._policy.tokenizer
        texts = tokenizer.batch_decode([list(ids) for ids in responses], skip_special_tokens=True)
        different = list(dict.fromkeys(texts))
        verifier = self._verification.of(task)
        verdicts = self._verification.pool.verify_many(verifier, [(task, text) for text in different])
        scores = {}
        for text, verdict in zip(different, verdicts, strict=True):
            if verdict.score is None:
                raise DataError(f"{task.named}: the verdict on {text!r} is undecided: {verdict.reason}")
            scores[text] = verdict.score
        return np.asarray([scores[text] for text in texts], dtype=np.float64)
