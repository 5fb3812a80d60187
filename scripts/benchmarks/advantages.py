"""Time every registered advantage estimator and modifier on one step of many groups.

    python scripts/benchmarks/advantages.py [--groups 1000] [--size 64] [--tokens 4] [--rounds 7]
        [--out advantages.json]

One process, on the CPU. Every response has a prompt of 2 tokens and 1 to 2 x `tokens` sampled ones; a fifth of the
verdicts has scored spans. Components that read statistics of the policy get random ones, since the forward pass is not
theirs. A modifier is timed on the advantages of `group`, with one number per response. The file has the median of
the rounds, in milliseconds of CPU time, which other programs on the machine change less than the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from result_file import result_file

from rlvr import registry
from rlvr.records import Batch, Origin, Rollout, StopReason, Task, Verdict

PROMPT = 2
ASKED: dict[str, dict[str, Any]] = {"blend": {"of": "other", "share": 0.1}}
"""Options without which a component does nothing here."""
STATISTICS = ("logprobs", "entropy", "sum_squared_probs", "logsumexp", "mean_logit", "max_logit")


def make_batch(groups: int, size: int, tokens: int, seed: int = 0) -> Batch:
    """A scored step."""
    random = np.random.default_rng(seed)
    rollouts, lengths = [], random.integers(1, 2 * tokens + 1, (groups, size))
    for g in range(groups):
        task = Task(id=f"t{g}", prompt="?", answer="1")
        for m in range(size):
            rollouts.append(_rollout(task, g, m, int(lengths[g, m]), random))
    batch = Batch(rollouts, {"reward": (random.random(len(rollouts)) < 0.4).astype(np.float64)})
    batch.columns["reward/verdict"] = batch.columns["reward"]
    batch.columns["reward/other"] = random.normal(size=len(rollouts))
    for name in STATISTICS:
        values = [-random.random(len(r)) if name == "logprobs" else random.random(len(r)) for r in rollouts]
        batch.token_columns[f"{name}/current"] = [v.astype(np.float32) for v in values]
    return batch


def _rollout(task: Task, group: int, member: int, length: int, random: np.random.Generator) -> Rollout:
    total = PROMPT + length
    origin = np.full(total, Origin.POLICY, dtype=np.int8)
    origin[:PROMPT] = Origin.PROMPT
    logprobs = -random.random(total).astype(np.float32)
    logprobs[:PROMPT] = np.nan
    rollout = Rollout(
        id=f"{group}/{member}",
        task=task,
        group=str(group),
        member=member,
        token_ids=random.integers(0, 9, total),
        origin=origin,
        behaviour_logprobs=logprobs,
        policy_version=np.where(origin == Origin.POLICY, 0, -1).astype(np.int32),
        stop=StopReason.END,
        text="a" * length,
        char_ends=np.where(origin == Origin.POLICY, np.arange(total) - PROMPT + 1, -1),
    )
    spans = ((0, length, 1.0),) if member % 5 == 0 else ()
    rollout.verdicts["made up"] = Verdict.from_score(1.0, answer=str(member % 3), spans=spans)
    return rollout


def median_milliseconds(call: Any, rounds: int) -> float:
    """The median of `rounds` calls after one that does not count."""
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - start))
    return round(statistics.median(times), 2)


def measure(groups: int, size: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Kind -> name -> milliseconds."""
    batch = make_batch(groups, size, tokens)
    found: dict[str, dict[str, float]] = {"advantage": {}, "modifier": {}}
    plain = registry.build("advantage", "group")(batch)
    for kind, times in found.items():
        for name in registry.names(kind):
            piece = registry.build(kind, {"name": name, **ASKED.get(name, {})})
            arguments = (batch,) if kind == "advantage" else (batch, plain)
            times[name] = median_milliseconds(lambda piece=piece, arguments=arguments: piece(*arguments), rounds)
            print(f"{kind:10} {name:16} {times[name]:8.1f} ms", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 1000), ("size", 64), ("tokens", 4), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--out",
        type=result_file("milliseconds", "groups", "processor"),
        default=str(Path(__file__).with_suffix(".json")),
    )
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in ("groups", "size", "tokens", "rounds")}
    result = {
        "milliseconds": measure(**sizes),
        **sizes,
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
