"""Recorded rollouts in the place of an engine: what `rollout.engine: {name: recorded, path: RUN}` means.

Step N trains on what was recorded at step N. Invariants: a step is read whole and checked whole before it trains;
nothing that was recorded is changed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from rlvr.core.specs import ComponentSpec
from rlvr.errors import ConfigError, DataError
from rlvr.monitor.recording import columns_of, ranges, read_recorded, recorded_config, recorded_steps
from rlvr.policy import Policy
from rlvr.records import Rollout
from rlvr.registry import register
from rlvr.rollout.buffer import StepRollouts
from rlvr.rollout.engine import EngineFactory, InFlight
from rlvr.rollout.hf import HFEngine, HFEngineOptions


@register("engine", "recorded")
@dataclass(frozen=True)
class RecordedOptions(EngineFactory):
    """No engine: training takes the rollouts that another run recorded. Evaluations sample with `hf`."""

    path: str
    """The folder of the run that recorded them (with `logging.rollouts: 1`)."""
    rescore: bool = False
    """Verify them again with this configuration's `verifier` and reward them by its `rewards`. False: verdicts and
    rewards are those that were recorded."""
    copy_weights: bool | None = None
    """Sample evaluations with a copy of the weights; null: as the recorded run did. With a copy, `algorithm.correction:
    auto` weighs tokens by their ratio to the policy that sampled, as it does for any engine with weights of its own."""

    def for_run(self, longest: int | None, partitions: bool, heartbeat_timeout: float | None) -> Self:
        """A copy of the weights where a rank does not have them all."""
        # `or None` keeps null where no copy is forced: False would say "share the weights", whatever the recorded run
        # did.
        return dataclasses.replace(self, copy_weights=self.copy_weights or partitions or None)

    def open(self, policy: Policy, in_flight: InFlight | None = None) -> HFEngine:
        """The engine that evaluations sample with."""
        if self.copy_weights is None:
            copies = copied_weights(self.path)
        else:
            copies = self.copy_weights
        return HFEngine(policy, HFEngineOptions(copy_weights=copies), in_flight)


def copied_weights(run: str | Path) -> bool:
    """Return True if the engine of a run had weights of its own."""
    section = recorded_config(run).get("rollout")
    engine = ComponentSpec.parse((section if isinstance(section, dict) else {}).get("engine") or "hf")
    copies = engine.options.get("copy_weights")
    # A replay of a replay: the option is that of the run at the beginning of the chain.
    if engine.name == "recorded" and copies is None:
        return copied_weights(engine.options["path"])
    return engine.name not in ("hf", "recorded") or bool(copies)


class Recording:
    """The rollouts of a run, step by step, for a policy. `first` to `last` are the steps that are going to be read.

    ConfigError where some of them were not recorded.
    """

    def __init__(self, run: str | Path, policy: Policy, first: int, last: int, needs_logprobs: bool) -> None:
        self.policy = policy
        self.needs_logprobs = needs_logprobs
        self._files = recorded_steps(run)
        # The model's size and not the tokenizer's: an id in between has an embedding, one past it raises an index error
        # deep in the forward pass.
        self._vocabulary = int(policy.causal_lm.config.get_text_config().vocab_size)
        missing = [step for step in range(first, last + 1) if step not in self._files]
        if missing:
            raise ConfigError(
                f"rollout.engine: steps {ranges(missing)} of {first}-{last} are not among the recorded rollouts of "
                f"{run} (there are {ranges(list(self._files))}): set run.steps to the steps that there are, or record "
                "with logging.rollouts=1"
            )
        if first <= last:
            self._check_tokenizer(self._files[first])

    def read(self, step: int) -> StepRollouts:
        """Return the rollouts collected for a step. DataError, with file and line, for what cannot be trained on."""
        path = self._files[step]
        # `use` of a row: "added" rollouts came into the batch after the collection, and this run's stage adds its own;
        # "dropped" ones were sampled but replaced by dynamic sampling, and count in metrics only.
        rows = [row for row in read_recorded(path) if row.use != "added"]
        for row in rows:
            if (problem := self._problem(row.rollout)) is not None:
                raise DataError(f"{path}, line {row.line}: {problem}")
        kept = [row for row in rows if row.use != "dropped"]
        dropped = [row for row in rows if row.use == "dropped"]
        if not kept:
            raise DataError(f"{path} holds no rollout that trained: leave this step and those after it out (run.steps)")
        # The order of StepRollouts.columns: [*rollouts, *dropped].
        columns = columns_of([row.scored for row in [*kept, *dropped]])
        return StepRollouts([r.rollout for r in kept], [r.rollout for r in dropped], ready=0, columns=columns)

    def _problem(self, rollout: Rollout) -> str | None:
        """Why the policy cannot train on a rollout; None where it can."""
        largest = int(max(rollout.token_ids, default=0))
        length = len(rollout)
        if largest >= self._vocabulary:
            return (
                f"token {largest} is beyond the model's vocabulary of {self._vocabulary}: it was recorded with another "
                "tokenizer. Set model.path to the model that was recorded, or one with its tokenizer"
            )
        if length > self.policy.context:
            return (
                f"it has {length} tokens, and the model's context is {self.policy.context}: use a model with a "
                "longer one"
            )
        if self.needs_logprobs and np.isnan(rollout.behaviour_logprobs[rollout.sampled]).any():
            return (
                "the log-probs that it was sampled with are not there, and the loss takes a ratio to them: set "
                "optim.updates_per_batch and optim.epochs_per_batch to 1 and algorithm.correction to null, or choose "
                "a loss without a ratio"
            )
        return None

    def _check_tokenizer(self, path: Path) -> None:
        """DataError where none of a file's single-turn completions is what the policy's tokenizer makes of their
        tokens."""
        compared = 0
        for row in read_recorded(path):
            rollout = row.rollout
            # Several turns are joined by newlines that no token stands for, so their text is not the decoding of their
            # tokens.
            if not rollout.text or len(rollout.segments) > 1 or row.use == "added":
                continue
            if (problem := self._problem(rollout)) is not None:
                raise DataError(f"{path}, line {row.line}: {problem}")
            ids = rollout.token_ids[rollout.sampled].tolist()
            # Compared by words: versions of a tokenizer differ in white space at the ends. One match proves enough,
            # since ids of another vocabulary decode to other words; no match in a whole file proves the opposite.
            if str(self.policy.tokenizer.decode(ids, skip_special_tokens=True)).split() == rollout.text.split():
                return
            compared += 1
        if compared:
            raise DataError(
                f"{path}: none of its {compared} completions is what the model's tokenizer makes of their tokens: "
                "they were recorded with another tokenizer. Set model.path to the model that was recorded, or one "
                "with its tokenizer"
            )
