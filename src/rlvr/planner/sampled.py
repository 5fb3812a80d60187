"""The longest sequences that a stage and its evaluations sample, and how many at once, as far as the settings bound
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.config import Config
from rlvr.evaluation.evaluation_loop import BLOCK
from rlvr.evaluation.held_out import longest_response
from rlvr.planner.shape import Shape

# A guess: GSM8K and MATH prompts with a chat template are below it, those of code tasks may be above.
# data.max_prompt_tokens replaces it.
PROMPT = 512
"""Tokens that a prompt is taken to have where no setting bounds it."""


@dataclass(frozen=True)
class Sampled:
    """Prompts and responses that an engine has at once."""

    prompt: int
    """Tokens of the longest prompt."""
    length: int
    """Tokens of the longest sequence, prompt and response together."""
    prompts: int
    """Different prompts (a number)."""
    responses: int
    """Responses to all prompts together (a number)."""


def lengths(shape: Shape, config: Config) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest sequence in training, as far as the settings bound them."""
    return _lengths(shape, config, config.rollout.max_new_tokens)


def in_training(shape: Shape, config: Config) -> Sampled:
    """Prompts and responses of a step of a stage."""
    rollout = config.rollout
    more = 1.0
    if rollout.dynamic_sampling is not None:
        # Draws beyond the step's own are sampled at the same time.
        more = rollout.dynamic_sampling.oversample
    prompts = math.ceil(rollout.prompts_per_step * more) * (1 + rollout.staleness)
    return Sampled(*lengths(shape, config), prompts, prompts * rollout.group_size)


def in_evaluation(shape: Shape, config: Config, given: Any = None) -> Sampled | None:
    """Prompts and responses of a stage's evaluations, taken to be no longer than those of training; None where it has
    none.

    `given`: tasks that were given in Python, in the place of `data.eval`.
    """
    evaluation = config.evaluation
    if evaluation.data is not None:
        spec = evaluation.data
    else:
        spec = config.data.eval if given is None else given
    if spec is None or not (evaluation.every or evaluation.at_start or evaluation.at_end):
        return None
    tasks = min(_count(spec), evaluation.limit or BLOCK)
    # blocks of tasks, as rlvr.evaluation.evaluation_loop makes them: first with greedy responses, then with samples
    blocks = [(tasks, tasks)] if evaluation.greedy else []
    if evaluation.samples:
        # A block holds about BLOCK responses, whatever the number of samples.
        prompts = min(tasks, max(1, BLOCK // evaluation.samples))
        blocks.append((prompts, prompts * evaluation.samples))
    if not blocks:
        return None
    prompt, length = _lengths(shape, config, longest_response(config))
    return Sampled(prompt, length, *max(blocks, key=lambda block: block[1]))


def _lengths(shape: Shape, config: Config, new: int) -> tuple[int, int]:
    # At least one token of the context is the prompt's.
    new = min(new, shape.context - 1)
    prompt = config.data.max_prompt_tokens or PROMPT
    return min(prompt, shape.context - new), min(prompt + new, shape.context)


def _count(spec: Any) -> int:
    """Tasks that `spec` writes, at most a block of an evaluation; a file's are not counted, and taken to be more."""
    if _is_source(spec):
        return min(BLOCK, int(spec.get("count", BLOCK)))
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return min(BLOCK, sum(_count(one) if isinstance(one, str) or _is_source(one) else 1 for one in spec))
    return BLOCK


def _is_source(spec: Any) -> bool:
    return isinstance(spec, Mapping) and "name" in spec
