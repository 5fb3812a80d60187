"""Requests and completions, translated to vLLM's fields and back, the same for an engine and a server.

Semantics are those of the hf engine: the end token is part of the completion, stop strings stay in it, what is decoded
for verifiers has no special tokens, and a completion that fills the context is told from one that reaches
`max_new_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlvr.errors import DataError
from rlvr.policy import Policy
from rlvr.records import StopReason
from rlvr.rollout.engine import Completion, Request

# `_MAX_TEMP` in vllm/sampling_params.py (0.32). Silently raised there, so refused here: the recorded log-probs would be
# of another temperature than the configuration's.
COLDEST = 0.01
"""vLLM raises temperatures below this to it, except 0."""


@dataclass(frozen=True)
class Answer:
    """vLLM's result of one request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    stop_reason: int | str | None
    versions: Sequence[tuple[str, int, int]]
    """(version, first token, past the last)"""
    first_tokens: Mapping[int, float] = field(default_factory=dict)
    """Alternatives of the first token -> log-prob, where they were asked for."""
    adapter: int | None = None
    """The version of the adapter that sampled it, where one is sent by itself: vLLM's versions are of the weights under
    it."""


@dataclass(frozen=True)
class Opened:
    """An open request, with what is needed to make its completion."""

    request: Request
    limit: int
    """Tokens that may be sampled: max_new_tokens, or what the context leaves."""
    start: float


def opened(request: Request, context: int) -> Opened:
    """Check a request. DataError when it is not for vLLM, or fills the context."""
    available = context - len(request.token_ids)
    if not request.token_ids or available < 1:
        raise DataError(
            f"a prompt of {len(request.token_ids)} tokens cannot be continued: the engine's context is {context} "
            "tokens (the model's, or rollout.engine's max_model_len)"
        )
    if 0 < request.sampling.temperature < COLDEST:
        raise DataError(
            f"rollout.temperature {request.sampling.temperature} is below {COLDEST}, which vLLM does not sample at: "
            f"use 0 (greedy), at least {COLDEST}, or rollout.engine hf"
        )
    return Opened(request, min(request.sampling.max_new_tokens, available), time.perf_counter())


def parameters(item: Opened, end_ids: Sequence[int], constraint: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of vLLM's SamplingParams; `constraint` holds for requests without one of their own."""
    sampling = item.request.sampling
    if item.request.constraint is not None:
        constraint = item.request.constraint
    fields: dict[str, Any] = {
        "max_tokens": item.limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": item.request.seed,
        # Together with `logprobs_mode: processed_logprobs` of the engine: after temperature and truncation, of the
        # sampled token, and of the likeliest ones where these are wanted.
        "logprobs": item.request.alternatives,
        "ignore_eos": sampling.ignore_eos,
        # All end ids of the policy (its generation config may name several); vLLM by itself knows the tokenizer's one.
        "stop_token_ids": [] if sampling.ignore_eos else list(end_ids),
        # vLLM looks for stop strings in text. Without them its detokenizer is wasted work: the completion is decoded
        # here.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }
    if sampling.stop:
        # vLLM by default cuts the stop string off the text; the tokens that made it were sampled and train.
        fields |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if constraint:
        fields["structured_outputs"] = dict(constraint)
    return fields


def completion(item: Opened, answer: Answer, policy: Policy) -> Completion:
    """The completion of a request. DataError when vLLM ended it for an error of its own."""
    ids = np.asarray(answer.token_ids, dtype=np.int64)
    # versions int32 [N], from spans (version, first, past the last); -1 where no span covers a token
    versions = np.full(len(ids), -1, dtype=np.int32)
    for version, first, end in answer.versions:
        versions[first:end] = int(version) if answer.adapter is None else answer.adapter
    return Completion(
        token_ids=ids,
        logprobs=np.asarray(answer.logprobs, dtype=np.float32),
        versions=versions,
        stop=_reason(item, answer),
        text=str(policy.tokenizer.decode(ids.tolist(), skip_special_tokens=True)),
        seconds=time.perf_counter() - item.start,
        first_tokens=answer.first_tokens if item.request.alternatives else {},
    )


def _reason(item: Opened, answer: Answer) -> StopReason:
    if answer.finish_reason == "length":
        # vLLM says "length" for both; `limit` is the smaller of max_new_tokens and what the context leaves.
        if item.limit == item.request.sampling.max_new_tokens:
            return StopReason.LENGTH
        return StopReason.CONTEXT
    if answer.finish_reason == "stop":
        # vLLM: the stop string, the id of a stop token, or None for the tokenizer's own end token.
        if isinstance(answer.stop_reason, str):
            return StopReason.STOP_STRING
        return StopReason.END
    if answer.finish_reason == "abort":
        return StopReason.ABORTED
    raise DataError(f"vLLM ended a request for {answer.finish_reason!r}")
