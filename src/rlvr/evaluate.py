"""python -m rlvr.evaluate --model PATH --data FILE [--samples N] [--k 1,8,...] [key.path=value ...]

Samples a model on held-out tasks and writes a JSON object: `results` (greedy, mean, pass@k, maj@k with bootstrap intervals
over tasks, interquartile mean), the same by source, answer entropy, truncation, and `by_task`, from which `--compare` takes the
differences to an earlier result, with paired intervals, and which tasks each can solve. Tasks are gone through in blocks:
memory does not grow with tasks x samples. Everything else is said as for training: `--config` of a run (its template, its
verifier) and settings as key.path=value.

Exit codes: 0 done, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM (nothing is written then).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.config_loading import load_config
from rlvr.data import Draw, History, Prompts, load_tasks
from rlvr.errors import ConfigError, DataError, command
from rlvr.evaluation import (
    Collect,
    Evaluation,
    Tally,
    compare,
    contamination,
    evaluate,
    interquartile_mean,
    interval,
    summary,
    values_of,
)
from rlvr.records import Rollout, Task

VERSION = 1
"""Of the written object."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlvr.evaluate", description="Evaluate a model on held-out tasks.")
    parser.add_argument("--model", metavar="PATH", help="a folder with Hugging Face files, a hub name, or a checkpoint")
    parser.add_argument(
        "--data", action="append", metavar="DATA", help="tasks, as data.eval takes them; may be repeated"
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="responses sampled per task (default 8; 0: greedy only)"
    )
    parser.add_argument("--k", metavar="1,8,...", help="the k of pass@k and maj@k (default 1 and the samples)")
    parser.add_argument("--verifier", metavar="NAME", help="in place of the tasks' own")
    parser.add_argument("--engine", metavar="NAME", help="hf (default), vllm or vllm-server")
    parser.add_argument("--temperature", type=float, metavar="T", help="of the samples (default 1)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest response (default 256)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first so many tasks")
    parser.add_argument("--no-greedy", action="store_true", help="no greedy response")
    parser.add_argument("--seed", type=int, metavar="N", help="of the samples (default 0)")
    parser.add_argument(
        "--config", metavar="FILE", help="configuration of a run: model, template, verifier, engine ..."
    )
    parser.add_argument("--compare", metavar="RESULT", help="an earlier result on the same tasks")
    parser.add_argument("--contamination", metavar="DATA", help="training tasks in which the tasks are looked for")
    parser.add_argument("--output", metavar="FILE", help="where the JSON goes (default: standard output)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of the configuration")
    return parser


def _run(options: argparse.Namespace) -> int:
    config = _config(options)
    spec = options.data if options.data is not None else config.evaluation.data or config.data.eval
    if spec is None:
        raise ConfigError("there are no tasks to evaluate on: give --data, or data.eval")
    spec = spec[0] if isinstance(spec, list) and len(spec) == 1 else spec
    before = None if options.compare is None else read_result(Path(options.compare))
    tasks = load_tasks(spec, split="eval", fields=config.data.fields)[: config.evaluation.limit]
    extra: dict[str, Any] = {}
    if options.contamination is not None:
        train = load_tasks(options.contamination, split="train", fields=config.data.fields)
        extra["contamination"] = contamination(train, tasks)
    began = time.perf_counter()
    with sampler(config, tasks) as (collect, same, stop):
        done = evaluate(tasks, config, collect, same, lambda count: _say(count, len(tasks), began))
        if stop.signal is not None:
            return 128 + int(stop.signal)
    result = describe(done, config) | {"seconds": time.perf_counter() - began} | extra
    if before is not None:
        result["comparison"] = compare(before, done.tallies, config.evaluation.k)
    _write(result, options.output)
    return 0


def _say(done: int, tasks: int, began: float) -> None:
    print(f"{done}/{tasks} tasks, {time.perf_counter() - began:.0f} s", file=sys.stderr)


def _config(options: argparse.Namespace) -> Config:
    """The configuration that the options write. ConfigError where they contradict each other."""
    given = load_config(options.config, options.overrides)
    asked: dict[str, Any] = {"at_start": False, "at_end": False}
    samples = options.samples if options.samples is not None else given.evaluation.samples or 8
    if samples < 0:
        raise ConfigError("--samples is a number from 0 on")
    asked["samples"] = samples
    asked["k"] = _ks(options.k, samples, given)
    for name in ("temperature", "max_new_tokens", "limit"):
        if getattr(options, name) is not None:
            asked[name] = getattr(options, name)
    if options.no_greedy:
        asked["greedy"] = False
    tree: dict[str, Any] = given.dump()
    tree["evaluation"] |= asked
    if options.verifier is not None:
        tree["verifier"] = options.verifier
    if options.engine is not None:
        tree["rollout"]["engine"] = options.engine
    if options.seed is not None:
        tree["run"]["seed"] = options.seed
    if options.model is not None:
        tree["model"] |= {"path": str(_model_folder(options.model)), "scratch": None}
    if tree["model"]["path"] is None and tree["model"]["scratch"] is None:
        raise ConfigError("there is no model to evaluate: give --model, a folder or a hub name")
    if not samples and not tree["evaluation"]["greedy"]:
        raise ConfigError("--samples 0 with --no-greedy leaves nothing to evaluate")
    return load_config(tree)


def _ks(written: str | None, samples: int, given: Config) -> list[int]:
    """The k asked for. ConfigError for one that is no number or larger than the samples."""
    if written is None:
        fitting = [k for k in given.evaluation.k if k <= samples]
        return fitting if given.evaluation.samples else sorted({1, samples} - {0})
    try:
        ks = sorted({int(part) for part in written.split(",")})
    except ValueError:
        raise ConfigError(f"--k is a list of numbers like 1,8,64, not {written!r}") from None
    if ks[0] < 1 or ks[-1] > samples:
        wrong = ks[0] if ks[0] < 1 else ks[-1]
        raise ConfigError(f"pass@{wrong} cannot be estimated from {samples} samples: raise --samples, or lower --k")
    return ks


def _model_folder(path: str) -> Path | str:
    """The folder of the model: that of a checkpoint or of the newest checkpoint of a run, where `path` is one."""
    folder = Path(path)
    if (folder / "model").is_dir():
        return folder / "model"
    numbered = [p for p in folder.glob("checkpoints/step-*/model") if p.parent.name.removeprefix("step-").isdigit()]
    return max(numbered, key=lambda p: int(p.parent.name.removeprefix("step-"))) if numbered else path


@contextmanager
def sampler(config: Config, tasks: Sequence[Task]) -> Iterator[tuple[Collect, Any, Any]]:
    """What samples and verifies under `config`, what tells answers apart, and the request to stop.

    Samples are those that the trainer's own evaluation would draw: seeds follow from the run's seed, task, member and call.
    """
    from rlvr.distributed import World
    from rlvr.distributed.farm import open_engine, prove
    from rlvr.distributed.weights import weight_buckets
    from rlvr.policy import load_policy
    from rlvr.rollout import Collector, Interrupted, Means, Sampling, evaluation_plan
    from rlvr.seeding import seed_of
    from rlvr.signals import StopRequest
    from rlvr.verifiers import VerifierPool
    from rlvr.verifiers.routing import Verification

    with ExitStack() as stack:
        checks = config.verification
        pool = VerifierPool(checks.workers, checks.time_limit, checks.memory_mb, checks.concurrent)
        stack.callback(pool.close)
        verification = Verification(config.verifier, pool)
        verification.check(tasks)
        policy = load_policy(config.model, config.run.seed)
        prompts, world, stop = Prompts(policy.tokenizer, config.data.template), World(), StopRequest()
        _check_lengths(tasks, prompts, policy.context)
        collector = Collector(lambda: bool(stop))
        stack.callback(collector.close)
        engine = open_engine(config.rollout.engine, policy, None, world, collector, False)
        stack.callback(engine.close)
        engine.publish(1, lambda: weight_buckets(policy))
        if not engine.shares_weights:
            prove(engine, world, policy, collector, lambda: weight_buckets(policy))

        def collect(draws: Sequence[Draw], sampling: Sampling, samples: int) -> list[Rollout]:
            means = Means(
                generate=engine.generate,
                verify=verification.verify,
                prompt=prompts,
                reply=prompts.reply,
                context=getattr(engine, "context", policy.context),
                seed=lambda *more: seed_of(config.run.seed, "evaluation", *more),
                sampling=sampling,
                group_size=samples,
                history=History(),
                verify_group=verification.verify_group,
                by_group=verification.by_group,
                same_answer=verification.same_answer,
            )
            try:
                return collector.collect(draws, evaluation_plan(config.rollout.plan), means, config.rollout.deadline)
            except Interrupted:
                return []

        with stop:
            yield collect, verification.of(tasks[0]).same_answer, stop


def _check_lengths(tasks: Sequence[Task], prompts: Prompts, context: int) -> None:
    for task in tasks:
        if (length := len(prompts(task))) >= context:
            raise DataError(
                f"task {task.id!r}: its prompt has {length} tokens, and the model's context of {context} leaves no room for "
                "a response: shorten it or leave it out"
            )


def describe(done: Evaluation, config: Config) -> dict[str, Any]:
    """The object that is written: results with intervals, by source, and by task."""
    asked, tallies = config.evaluation, done.tallies
    how = (asked.k, asked.greedy, asked.samples > 0)
    sources = dict.fromkeys(t.source for t in tallies)
    entropies = [t.answer_entropy for t in tallies if t.answer_entropy is not None]
    return {
        "version": VERSION,
        "model": config.model.path,
        "samples": asked.samples,
        "k": asked.k,
        "sampling": {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        | {"max_new_tokens": asked.max_new_tokens or config.rollout.max_new_tokens, "seed": config.run.seed},
        "results": _with_intervals(tallies, *how),
        "answer_entropy": sum(entropies) / len(entropies) if entropies else None,
        "by_source": {str(s): _with_intervals([t for t in tallies if t.source == s], *how) for s in sources},
        "by_task": [tally.to_json() for tally in tallies],
    }


def _with_intervals(tallies: Sequence[Tally], ks: Sequence[int], greedy: bool, samples: bool) -> dict[str, Any]:
    plain = summary(tallies, ks, greedy, samples)
    values = values_of(tallies, ks)
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found[name] = value
        if name in values and value is not None:
            found[f"{name} interval"] = interval(values[name])
    if samples and found.get("mean") is not None:
        known = values["mean"][values["mean"] == values["mean"]]
        found["iqm"], found["iqm interval"] = float(interquartile_mean(known)), interval(known, interquartile_mean)
    return found


def read_result(path: Path) -> list[Tally]:
    """The tallies of a written result. DataError where it is none."""
    try:
        written: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return [Tally.from_json(row) for row in written["by_task"]]
    except OSError as error:
        raise DataError(f"--compare: {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"--compare: {path} is no result of rlvr.evaluate") from error


def _write(result: Mapping[str, Any], output: str | None) -> None:
    text = json.dumps(result, indent=1, allow_nan=False)
    if output is None:
        print(text)
        return
    path = Path(output)
    aside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text + "\n", encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise ConfigError(f"--output {output!r} cannot be written: {error}") from error
    print(f"results: {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
