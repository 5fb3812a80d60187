"""The registry of metric names, and the one record that a step writes under them.

Invariants:
- Every key of metrics.jsonl is registered here or belongs to a family (`eval/*`, `reward/*` ...), whose members are
  free.
- A record holds every registered key at every step, null when not computed; NaN and infinities are null. So a table
  of metrics.jsonl has the same columns from the first line to the last.
- Shares are fractions in [0, 1], times are seconds, log-probabilities and entropies are in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.errors import nearest


@dataclass(frozen=True)
class Metric:
    """A number that a step reports: its key, its unit, its meaning, and its values in a healthy run."""

    name: str
    unit: str
    description: str
    healthy: str
    clocked: bool = False
    """True if the value depends on the speed of the machine although its unit does not show it."""

    @property
    def of_the_clock(self) -> bool:
        """Return True if two runs of the same seed differ in it."""
        return self.clocked or self.unit in ("seconds", "tokens/s", "GB/s", "GiB")


_PHASES = {
    "rollout": "generating completions",
    "verify": "waiting for verdicts",
    "score": "computing rewards, selection and advantages",
    "update": "forward, backward and optimizer steps",
    "publish": "handing the new weights to the engine",
}

# A row for each metric, as docs/metrics.md has it: key | unit | meaning | healthy. A fifth cell `clock` marks one that
# depends on the speed of the machine although its unit does not show it; an indented line goes on with the row before.
_BEFORE_MEMORY = """
step | steps | The step, counted from 1 across all stages. | grows by 1
run/stage | name | The stage that the step belongs to. | -
run/epoch | epochs | Passes over the training tasks so far. | grows
# Rewards and verdicts
reward/mean | reward | Mean reward of the decided rollouts. | rises, then levels off
reward/std | reward | Standard deviation of the reward over decided rollouts. | above 0
reward/undecided | share | Share of rollouts without a reward; they are left out of the loss. | 0
reward/raised | rollouts | Rollouts for which a reward function raised an exception. | 0
advantage/mean | advantage | Mean advantage. | near 0
advantage/std | advantage | Standard deviation of the advantage. | above 0; 0 teaches nothing
verdict/correct | share | Share of rollouts judged correct. | -
verdict/wrong | share | Share of rollouts judged wrong. | -
verdict/partial | share | Share of rollouts given a score between right and wrong. | -
verdict/unparsable | share | Share of rollouts in which no answer was found; they score 0. | -
verdict/timeout | share | Share of rollouts whose check ran out of time; they score 0 where the answer spent it, and are
    undecided otherwise. | -
verdict/error | share | Share of rollouts whose check failed; undecided, unless the answer made it fail. | -
span/missing | share | Share of the decided responses without a scored span, of the term (or of the verdict, where the
    advantage reads its spans) that leaves most of them without; null where nothing reads any. | below 1
verdict/raised | verdicts | Verdicts that are missing because the verifier raised an exception. | 0
# Groups
group/count | groups | Groups in the batch. | rollout.prompts_per_step
group/all_correct | share | Share of groups in which every decided score is 1. | low: else too easy
group/all_wrong | share | Share of groups in which every decided score is 0. | low: else too hard
group/mixed | share | Share of groups with any other decided scores. | above 0.2
group/undecided | share | Share of groups without a single decided score. | 0
group/zero_variance | share | Share of groups whose decided rewards are all the same. | below 0.8
# Completions and throughput
completion/length_mean | tokens | Mean length of the completions. | no sudden jump
completion/length_max | tokens | Longest completion. | below rollout.max_new_tokens
completion/length_min | tokens | Shortest completion. | above a few tokens
completion/truncated | share | Share of completions that were cut; null with `rollout.ignore_eos`. | below 0.1
completion/repetition | share | Share of sampled runs of 4 tokens that stood in their completion before. | low
completion/duplicates | share | Share of completions that are copies of an earlier one of their group. | low
tokens/sampled | tokens | Tokens that the policy sampled in this step. | -
tokens/trained | tokens | Tokens that went through the backward pass, each counted once. | -
time/tokens_per_second | tokens/s | Sampled tokens over the seconds of the whole step; null at the first step after a
    resume. | steady
time/tokens_per_second_per_device | tokens/s | time/tokens_per_second over the number of ranks; the devices of servers
    are not counted. | steady
time/sampling_tokens_per_second | tokens/s | Sampled tokens over the seconds in which the engine had a request, all
    devices together; null as time/tokens_per_second. | steady
time/update_tokens_per_second_per_device | tokens/s | Tokens of the update's passes with a gradient, prompts included,
    over time/update and the number of ranks; a shared prefix counts once. | steady
# The update; averages over the optimizer steps of this step
loss/policy | loss | Policy-gradient loss. Its size says little: near 0 by construction. | near 0
loss/total | loss | Sum of all loss components as differentiated. | finite
grad_norm | norm | Norm of the gradient before clipping. | steady; spikes precede collapse
update/steps | steps | Optimizer steps taken in this step; fewer than set where it had fewer groups, or where one was
    skipped. | optim.updates_per_batch x epochs_per_batch
lr | 1 | Learning rate of the last optimizer step. | as scheduled
kl/ref | nats | KL divergence of the policy from the reference. | grows slowly from 0
entropy | nats | Entropy of the next-token distribution: minus the mean log-prob of all tokens sampled in this step,
    groups without an advantage included, under the weights that sampled. Where the policy does not sample (an sft
    stage, recorded rollouts) or no such log-prob is known: entropy/trained. | falls slowly; near 0 is collapse
entropy/trained | nats | Exact entropy at the tokens that have a gradient; null where none has. | often above entropy:
    groups that agree are not in it
ratio/mean | ratio | Probability ratio of current over proximal policy. | 1 on the first optimizer step
ratio/max | ratio | Largest ratio of a token. | below 10
ratio/clipped_low | share | Share of trained tokens clipped at the lower bound. | below 0.05
ratio/clipped_high | share | Share of trained tokens clipped at the upper bound. | below 0.05
tokens/kept | share | Mean factor that token selectors give the tokens of the policy loss. | as asked
tokens/chosen | share | Share of tokens that the loss selected in the whole step. | small
mismatch/mean | nats | Mean absolute difference of proximal and behaviour log-probs, of rollouts with a gradient and of
    a sample of the others. | below 0.01
mismatch/max | nats | Largest difference of a token. | below 1
mismatch/share_over | share | Share of tokens whose difference is over the gate. | below 0.01
mismatch/kl | nats | Estimate of KL(behaviour || proximal) per token. | below 0.01
mismatch/effective | share | Effective sample size of the tokens, over their number. | above 0.9
correction/weight | ratio | Mean weight that the correction gives a token. | near 1
correction/touched | share | Share of tokens whose weight is cut or masked. | below 0.05
skipped/nonfinite | share | Share of optimizer steps skipped for a NaN or infinite loss or gradient. | 0
# Versions of the weights
policy/version | version | Version of the weights after this step's update. | grows by 1
policy/staleness_mean | versions | Mean age of the weights that sampled a token. | 0 if synchronous
policy/staleness_max | versions | Age of the oldest weights that sampled a token. | 0 if synchronous
rollout/ready | groups | Groups of later steps that were complete when this one was taken. | - | clock
rollout/dropped | rollouts | Rollouts of groups that were replaced because they teach nothing. | -
publish/bytes | bytes | What was sent to the engine; null where it shares the weights. | steady
publish/seconds | seconds | Time that sending took, without the probe. | far below time/rollout
publish/gb_per_second | GB/s | publish/bytes over publish/seconds. | steady
# Devices
mfu/update | share | Model FLOPs utilisation of the update: operations that its passes need, over time/update and what
    the GPUs can do in bfloat16 (see below); null on a device that is not known. | 0.2 to 0.5 of a model that fills the
    GPU | clock
mfu/step | share | The same operations over time/step. | mfu/update times the update's share | clock
gpu/idle | share | Share of the step in which this rank's GPU had no work, by phases (see below); null on a CPU. | below
    0.1 | clock
"""
_AFTER_MEMORY = """
# Times
time/rollout | seconds | Time spent generating completions. | -
time/verify | seconds | Time spent waiting for verdicts. | -
time/score | seconds | Time spent computing rewards, selection and advantages. | -
time/update | seconds | Time spent forward, backward and optimizer steps. | -
time/publish | seconds | Time spent handing the new weights to the engine. | -
time/step | seconds | Wall clock of the step, evaluation and checkpoint apart. | steady
time/evaluate | seconds | Wall clock of the step's evaluation. | -
time/engine_idle | seconds | Time in which the engine had no request. | near 0 when sampling ahead
time/unaccounted | seconds | Wall clock of the step in none of the phases. | below 5 % of time/step
"""
_FAMILIES = """
reward/* | reward | Mean of one reward column over the rollouts in which it is decided. | -
explained/* | share | Share of the reward's variance within groups that goes with a term (squared correlation), of
    several terms. | most with the verdict
span/* | - | Of a term that scores parts of responses: the mean score of its decided spans, `span/NAME`, and the share
    of spans that are undecided, `span/NAME/undecided`. | -
role/* | - | `role/ROLE/METRIC`: a metric of reward, advantage, verdicts, groups and completions over the rollouts of a
    role, where a plan makes rollouts of roles of its own; the metric itself leaves them out. | -
loss/* | loss | A further component of the loss, named by the component that adds it. | finite
verifier/* | - | A count of a verifier since the step before, `verifier/NAME/COUNT`: the requests, failures, seconds,
    tokens and cost of a judge, say. | -
schedule/* | - | The value of a scalar that is scheduled or driven by a metric. | as scheduled
eval/* | - | A result of an evaluation, at the steps that run one. | rises
"""


def _metrics(table: str) -> Iterator[Metric]:
    rows = table.strip().replace("\n    ", " ").splitlines()
    for row in rows:
        if not row.startswith("#"):
            name, unit, description, healthy, *clock = row.split(" | ")
            yield Metric(name, unit, description, healthy, bool(clock))


_ALL = [
    *_metrics(_BEFORE_MEMORY),
    *(
        Metric(f"memory/{phase}{kind}{over}", "GiB", f"{what} while {text}, of {whose}; null on a CPU.", "steady")
        for phase, text in _PHASES.items()
        for kind, what in {"": "Peak of GPU memory in tensors", "_reserved": "Peak that torch's allocator held"}.items()
        for over, whose in {"": "the first rank", "_max": "the rank with the most"}.items()
    ),
    *_metrics(_AFTER_MEMORY),
]

# An insertion order that never changes: readers of metrics.jsonl as a table rely on the columns.
METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
"""Every key that a record always holds, in the order of the record."""

FAMILIES: dict[str, Metric] = {metric.name.removesuffix("*"): metric for metric in _metrics(_FAMILIES)}
"""Prefix -> a description of its members. A component may add members; they are in a record when computed."""


def metric_of(name: str) -> Metric | None:
    """The metric of a key of metrics.jsonl, by itself or as a member of a family; None for one of another version."""
    family = next((metric for prefix, metric in FAMILIES.items() if name.startswith(prefix)), None)
    return METRICS.get(name, family)


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """One step's record: every registered key, then the family members of `values`, all of them JSON values.

    A number may come as a Python, numpy or torch scalar. KeyError, with the nearest name, for a key that is neither
    registered nor in a family; TypeError for a value that is no scalar.
    """
    for name in values:
        if name not in METRICS and not name.startswith(tuple(FAMILIES)):
            raise KeyError(f"no metric is called {name!r}{nearest(name, METRICS)}")
    row = {name: _plain(name, values.get(name)) for name in METRICS}
    return row | {name: _plain(name, value) for name, value in values.items() if name not in METRICS}


def _plain(name: str, value: Any) -> Any:
    """`value` as JSON has it: None, bool, int, finite float or string."""
    # Integers of any size are exact in JSON; a float may be NaN or infinite, which JSON lacks.
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "item"):
        return _plain(name, value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    raise TypeError(f"the metric {name!r} must be a number, a string or None, not {type(value).__name__}")
