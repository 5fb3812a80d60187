"""The statistics that components declare, from one forward pass, without a [tokens, vocabulary] matrix.

Only trained positions are projected, by `fused_statistics`, tile by tile. Two kinds of model are less well off: where
the LM head cannot be taken apart it is called in chunks of at most `CHUNK` logits, each computed again in the backward
pass; where a model does more after its head than is known, its own logits are used.

What rewards and advantages read before the update is taken from the weights as they are, without gradient, in the
micro-batches of the update: token columns of a batch, and the log-probs of given token ids after given others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rlvr.config import OptimConfig
from rlvr.core.needs import CURRENT, Need, Statistic
from rlvr.policy.fused_head import fused_statistics
from rlvr.policy.microbatch import MicroBatch, micro_batches
from rlvr.policy.model import Head, Policy, head_of
from rlvr.records import Batch, Origin, Rollout, Task

CHUNK = 1 << 22
"""Logits at once where the head is called: 16 MiB in float32, of which a backward pass needs four."""


ALL = slice(None)


def forward(policy: Policy, rows: MicroBatch, needs: Iterable[Need]) -> dict[tuple[str, str], torch.Tensor]:
    """The statistics of the current model that `needs` names, at the trained tokens: (statistic, "current") -> [T].

    All are of the sampling distribution: logits divided by each token's temperature.
    """
    # Statistic -> whether any need asks for its gradient.
    differentiated: dict[str, bool] = {}
    for need in needs:
        if need.model == CURRENT:
            differentiated[need.statistic] = differentiated.get(need.statistic, False) or need.grad
    statistics = _fused(policy, rows, differentiated)
    return {(name, CURRENT): statistics[name] for name in differentiated}


def _fused(policy: Policy, rows: MicroBatch, differentiated: dict[str, bool]) -> dict[str, torch.Tensor]:
    inputs = (rows.input_ids, rows.position_ids, rows.spans)

    def of(head: Head, part: slice = ALL) -> dict[str, torch.Tensor]:
        return fused_statistics(
            head,
            rows.temperature[part],
            differentiated,
            rows.targets[part],
            id_range=rows.target_range,
            common_temperature=rows.common_temperature,
        )

    if not policy.head_is_enough:
        return of(Head((policy.own_logits(*inputs).flatten(0, 1).index_select(0, rows.source),)))
    # [R, L, H] -> [R * L, H] -> [T, H]: only hidden states that predict a trained token reach the head.
    hidden = policy.hidden_states(*inputs).flatten(0, 1).index_select(0, rows.source)
    if (head := head_of(policy, hidden)) is not None:
        return of(head)

    def called(part: slice) -> dict[str, torch.Tensor]:
        return of(Head((policy.logits(hidden[part]),)), part)

    # Tokens whose logits are CHUNK numbers; at least one token, however large the vocabulary is.
    size = max(1, CHUNK // max(1, policy.causal_lm.config.get_text_config().vocab_size))
    parts = [slice(start, start + size) for start in range(0, max(1, len(hidden)), size)]
    # Without a gradient nothing is kept, and checkpointing would only cost its bookkeeping.
    grad = torch.is_grad_enabled() and any(differentiated.values())
    chunks = [checkpoint(called, part, use_reentrant=False) if grad else called(part) for part in parts]
    return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}


class DeferredColumns:
    """Values at trained tokens that are to be written into token columns of the batch.

    They stay on the device until `write` fetches those of all micro-batches by one copy, which the host has to wait
    for.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]] = []
        self._values: list[torch.Tensor] = []

    def add(self, rows: MicroBatch, values: torch.Tensor, columns: Sequence[np.ndarray]) -> None:
        """Write [T] values of a micro-batch later."""
        self._parts.append((rows.index, rows.flat, columns))
        self._values.append(values.detach().float())

    def write(self) -> None:
        """Write all that was added."""
        if not self._parts:
            return
        # The one place where the host waits for these passes.
        fetched = torch.cat(self._values).cpu().numpy()
        cuts = np.cumsum([len(flat) for _, flat, _ in self._parts])[:-1]
        for (index, flat, columns), values in zip(self._parts, np.split(fetched, cuts), strict=True):
            # `flat` counts tokens of the micro-batch's rollouts one after the other, so the columns are joined, filled
            # and cut again.
            joined = np.concatenate([columns[i] for i in index])
            joined[flat] = values
            for i, part in zip(index, np.split(joined, np.cumsum([len(columns[i]) for i in index])[:-1]), strict=True):
                columns[i][:] = part
        self._parts.clear()
        self._values.clear()


def add_statistics(
    policy: Policy, batch: Batch, needs: Collection[Need], where: Sequence[np.ndarray], config: OptimConfig
) -> None:
    """Add the token columns `STATISTIC/current` that `needs` names, NaN but where `where` (bool [T_b] each) is True."""
    # int64 [rollouts with a marked token]: the others cost no forward pass.
    index = np.flatnonzero([bool(w.any()) for w in where])
    columns: dict[Statistic, list[np.ndarray]] = {
        need.statistic: [np.full(len(r), np.nan, dtype=np.float32) for r in batch.rollouts] for need in needs
    }
    later = DeferredColumns()
    # Without dropout, as the log-probs of the update that these are compared with.
    with torch.no_grad(), policy.evaluating():
        for rows in micro_batches(policy, batch, index, where, config) if len(index) else ():
            statistics = forward(policy, rows, needs)
            for name, values in columns.items():
                later.add(rows, statistics[name, "current"], values)
    later.write()
    batch.token_columns |= {f"{name}/current": values for name, values in columns.items()}


def encoded(policy: Policy, text: str) -> list[int]:
    """The token ids of a text by itself; of no text, the token that a text begins after."""
    if text:
        return [int(i) for i in policy.tokenizer.encode(text, add_special_tokens=False)]
    tokenizer = policy.tokenizer
    # Models without a beginning token, such as Qwen2, get the end token, which stands between texts.
    return [int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)]


def continuation_logprobs(
    policy: Policy, asked: Sequence[tuple[Sequence[int], Sequence[int]]], config: OptimConfig
) -> list[np.ndarray]:
    """float64 [K] each: of the K target ids of every (context, target), at temperature 1; both must not be empty.

    NaN where context and target do not fit into the policy's context.
    """
    fits = [n for n, (context, target) in enumerate(asked) if len(context) + len(target) <= policy.context]
    task = Task(id="given", prompt="")
    names = [f"given/{n}" for n in fits]
    batch = Batch(
        [Rollout.given(task, *asked[n], id=name, group=name, member=0) for n, name in zip(fits, names, strict=True)]
    )
    # bool [T_b] each: the tokens of the target.
    where = [r.origin == Origin.DEMONSTRATION for r in batch.rollouts]
    add_statistics(policy, batch, [Need("logprobs")], where, config)
    logprobs = [np.full(len(target), np.nan) for _, target in asked]
    for n, values, on in zip(fits, batch.token_columns[f"logprobs/{CURRENT}"], where, strict=True):
        logprobs[n] = values[on].astype(np.float64)
    return logprobs
