"""The evaluation behind python -m rlvr.evaluate: its configuration, its engine, its result."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.config.config_loading import config_tree, load_config, with_imports, with_tasks_of
from rlvr.config.stage_plan import stage_plans
from rlvr.core.own_files import check_output
from rlvr.core.startup_lines import startup
from rlvr.core.tree import read_mapping
from rlvr.core.waits import StopRequest
from rlvr.data import load_tasks
from rlvr.data.sources import limited
from rlvr.distributed import World
from rlvr.distributed.checkpoint import model_folder
from rlvr.errors import ConfigError
from rlvr.evaluate.result_file import is_result, write_result
from rlvr.evaluation import Evaluation, compare, contamination, describe, evaluate, read_result
from rlvr.evaluation.benchmarks import Benchmark, benchmark_tasks, find_benchmarks, with_benchmark
from rlvr.evaluation.held_out import longest_response
from rlvr.evaluation.result import combined, result_lines
from rlvr.monitor.console import Console, Counts
from rlvr.policy.loading import located
from rlvr.records import Task
from rlvr.rollout import CollectionInterruptedError
from rlvr.run.open_sampling import open_sampling
from rlvr.stages.grpo.scoring import chooser
from rlvr.verifiers.raised_verdicts import RaisedVerdicts

WRITTEN = "config.yaml"
"""The path of the configuration in a run folder."""


@dataclass(frozen=True)
class Part:
    """Tasks that are evaluated with one configuration: a benchmark, or the tasks of --data (`name` empty)."""

    name: str
    config: Config
    tasks: list[Task]
    benchmark: Benchmark | None = None


def evaluate_model(options: argparse.Namespace) -> int:
    """Evaluate as the options of the command say, and write the result; the exit code."""
    if options.output is not None:
        check_output(Path(options.output), is_result, "a result")
    parts = _benchmark_parts(options) if options.benchmark else [_data_part(options)]
    before = {}
    if options.compare is not None:
        before = {part.name: read_result(Path(options.compare), part.name) for part in parts}
    fields = parts[0].config.data.fields
    # Read here only for its errors; it is read again after sampling, so that it takes no memory in between.
    if options.contamination is not None:  # what cannot be read is refused before the model is sampled
        load_tasks(options.contamination, split="train", fields=fields)
    world = World.from_environment(parts[0].config.distributed.heartbeat_timeout)
    try:
        code = _evaluate(parts, world, options, before)
    # Also for Ctrl-C: the other ranks serve their engines until they learn that rank 0 is gone.
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        world.close()
    return code


def _data_part(options: argparse.Namespace) -> Part:
    """The tasks of --data, or those of the configuration."""
    config = _config(options)
    spec = options.data or config.evaluation.data or config.data.eval
    if spec is None:
        hub = ""
        if options.model is not None and not Path(options.model).exists():
            hub = f" (there is no folder {options.model} here, and a model of the hub brings no tasks)"
        raise ConfigError(f"there are no tasks to evaluate on: give --data or --benchmark, or data.eval{hub}")
    if isinstance(spec, list) and len(spec) == 1:
        spec = spec[0]
    startup.info("reading tasks")
    tasks = load_tasks(spec, split="eval", fields=config.data.fields)
    return Part("", config, limited(tasks, config.evaluation.limit, config.evaluation.limit_seed))


def _benchmark_parts(options: argparse.Namespace) -> list[Part]:
    """A part for each benchmark."""
    if options.data:
        raise ConfigError("--benchmark brings its own tasks: give it or --data, not both (--benchmark NAME=FILE)")
    parts = []
    for name, (benchmark, data) in find_benchmarks(options.benchmark).items():
        config = _config(options, benchmark)
        startup.info("reading tasks: %s from %s", name, data)
        tasks = benchmark_tasks(benchmark, data)
        if options.verifier is not None:
            # The configuration has it then.
            tasks = [replace(task, verifier=None) for task in tasks]
        tasks = limited(tasks, config.evaluation.limit, config.evaluation.limit_seed)
        parts.append(Part(name, config, tasks, benchmark))
    return parts


def _evaluate(parts: Sequence[Part], world: World, options: argparse.Namespace, before: Mapping[str, Any]) -> int:
    """Sample and write; the exit code. Ranks other than the first lend their engines until it is done."""
    results: dict[str, dict[str, Any]] = {}
    with sampler(parts, world) as (evaluate_tasks, stop, counts):
        console = Console(file=sys.stderr, counts=counts)
        if world.is_main:
            with suppress(CollectionInterruptedError):  # the exit code reports it
                for part in parts:
                    began = time.perf_counter()
                    done = _sampled(part, evaluate_tasks, console)
                    result = describe(done, part.config)
                    result |= {"seconds": time.perf_counter() - began, "ranks": world.size}
                    if part.benchmark is not None:
                        how = part.benchmark.model_dump(include={"title", "data", "source", "differs"})
                        result["benchmark"] = {"name": part.name, **how}
                    if part.name in before:
                        result["comparison"] = compare(before[part.name], done.task_results, part.config.evaluation.k)
                    results[part.name] = result
        # All ranks meet here; the others have nothing to do before but to serve their engines.
        code = world.broadcast(128 + int(stop.signal) if stop.signal else 0, "the evaluation")
    if code or not world.is_main:
        return code
    if options.contamination is not None:
        train = load_tasks(options.contamination, split="train", fields=parts[0].config.data.fields)
        for part in parts:
            results[part.name]["contamination"] = contamination(train, part.tasks)
    write_result(combined(results), options.output, result_lines(results))
    return 0


def _sampled(part: Part, evaluate_tasks: Callable[..., Evaluation], console: Console) -> Evaluation:
    """The evaluation of one part, with a bar on a terminal and a line for each verifier that raised."""
    label = f"{part.name}: " if part.name else ""
    settings = part.config.evaluation
    refuse = functools.partial(RaisedVerdicts.refuse_all, which="of the evaluation")
    responses = len(part.tasks) * (settings.samples + settings.greedy)
    with console.evaluating(part.name or "evaluation", len(part.tasks), responses):
        done = evaluate_tasks(part.tasks, part.config, judge=refuse)
    for name, count in done.raised.raised.items():
        print(
            f"warning: {label}the verifier {name!r} failed on {count} of {done.raised.asked[name]} answers, which are "
            f"left out. What it raised first:\n{done.raised.tracebacks[name]}",
            file=sys.stderr,
        )
    return done


def _widest(parts: Sequence[Part]) -> Config:
    """The configuration that the engine is opened with: of the first part, with the longest response of any."""
    tree = parts[0].config.dump()
    tree["evaluation"]["max_new_tokens"] = max(longest_response(part.config) for part in parts)
    return load_config(tree)


def _config(options: argparse.Namespace, benchmark: Benchmark | None = None) -> Config:
    """The configuration that the options write: that of --config or of the run, over it the benchmark's, over both the
    options. ConfigError where they contradict each other."""
    source = options.config
    if source is None and options.model is not None and (folder := _run_folder(options.model)) is not None:
        source = _of_run(folder, options.verifier, options.imports)
    tree: dict[str, Any] = config_tree(source)
    if options.imports:
        tree = with_imports(tree, options.imports)
    if benchmark is not None:
        tree = with_benchmark(load_config(tree).dump(), benchmark)
    base = load_config(tree, options.overrides)
    settings: dict[str, Any] = {"at_start": False, "at_end": False}
    samples = options.samples
    if samples is None:
        samples = base.evaluation.samples
        # 8 is a choice, for a model that no run's configuration gives a number for. A benchmark may be greedy alone.
        if benchmark is None:
            samples = samples or 8
    if samples < 0:
        raise ConfigError("--samples is a number from 0 on")
    settings["samples"] = samples
    # Checked before the configuration is, whose error would name keys that nobody wrote.
    settings["k"] = _ks(options.k, samples, base)
    for name in ("temperature", "max_new_tokens", "limit", "scorer"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    if options.no_greedy:
        settings["greedy"] = False
    tree = base.dump()
    tree["evaluation"] |= settings
    if options.verifier is not None:
        tree["verifier"] = options.verifier
    if options.engine is not None:
        tree["rollout"]["engine"] = options.engine
    if options.seed is not None:
        tree["run"]["seed"] = options.seed
    if options.model is not None:
        tree["model"] |= {"path": _model(options.model), "scratch": None}
    if tree["model"]["path"] is None and tree["model"]["scratch"] is None:
        raise ConfigError("there is no model to evaluate: give --model, a folder or a hub name")
    if not samples and not tree["evaluation"]["greedy"]:
        raise ConfigError("--samples 0 with --no-greedy leaves nothing to evaluate")
    return load_config(tree)


def _model(given: str) -> str:
    """The folder or the hub name of the model that --model names. ConfigError where there is none in a folder."""
    found = str(model_folder(given))
    if found == given and (Path(given) / WRITTEN).is_file():
        raise ConfigError(f"--model: the run {given} has no whole checkpoint yet")
    located("--model", found)
    return found


def _ks(written: str | None, samples: int, base: Config) -> list[int]:
    """The k asked for. ConfigError for one that is no number or larger than the samples."""
    if written is None:
        fitting = [k for k in base.evaluation.k if k <= samples]
        if base.evaluation.samples:
            return fitting
        # 0 samples leave k = 1, of which there is no result: only the greedy response is made.
        return sorted({1, samples} - {0})
    try:
        ks = sorted({int(part) for part in written.split(",")})
    except ValueError:
        raise ConfigError(f"--k is a list of numbers like 1,8,64, not {written!r}") from None
    if ks[0] < 1:
        raise ConfigError(f"pass@{ks[0]} is no result: the numbers of --k are 1 or more")
    if ks[-1] > samples:
        raise ConfigError(f"pass@{ks[-1]} cannot be estimated from {samples} samples: raise --samples, or lower --k")
    return ks


def _run_folder(model: str) -> Path | None:
    """The run that a model is of: a run folder, a checkpoint in one, or the checkpoint's model."""
    if not Path(model).exists():
        return None
    path = Path(model).resolve()
    # RUN, RUN/checkpoints/step-N, RUN/checkpoints/step-N/model.
    runs = [path, *(above.parent for above in path.parents[:2] if above.name == "checkpoints")]
    return next((run for run in runs if (run / WRITTEN).is_file() and (run / "checkpoints").is_dir()), None)


def _of_run(folder: Path, verifier: str | None, imports: Sequence[str]) -> dict[str, Any]:
    """Return the parts of a run's configuration that an evaluation uses, as the run's last stage had them, with another
    verifier where one is given, and further imports.

    Neither the engine nor the device: an evaluation often runs on another machine. The model is the checkpoint's, with
    its adapter, so nothing is added to it.
    """
    try:
        tree = with_tasks_of(folder, read_mapping(folder / WRITTEN))
    except ConfigError as error:
        raise ConfigError(f"{error}, or give the run's configuration with --config FILE") from error
    if verifier is not None:
        tree["verifier"] = verifier
        # The verifier of the command line goes before that of any stage.
        tree["stages"] = [{k: v for k, v in stage.items() if k != "verifier"} for stage in tree.get("stages") or []]
    if imports:
        tree = with_imports(tree, imports)
    last = stage_plans(load_config(tree))[-1].config.dump()
    # Left to the default, or to --engine: a run's `vllm-server`, say, names a machine.
    last["rollout"].pop("engine")
    return {
        **{
            name: last[name]
            for name in ("data", "rollout", "verifier", "verifiers", "verification", "evaluation", "rewards")
        },
        "run": {"seed": last["run"]["seed"]},
        "model": {"dtype": last["model"]["dtype"]},
    }


@contextmanager
def sampler(parts: Sequence[Part], world: World) -> Iterator[tuple[Callable[..., Evaluation], StopRequest, Counts]]:
    """`evaluate` with the sampling of the parts, which only rank 0 may call, the request to stop, and how far sampling
    and verifying are.

    It is called with the tasks and the configuration of a part.
    """
    tasks = [task for part in parts for task in part.tasks]
    of_parts = [(part.config, part.tasks) for part in parts]
    with open_sampling(_widest(parts), tasks, world, of_parts) as opened, opened.stop:

        def evaluate_tasks(some: Sequence[Task], how: Config, **hooks: Any) -> Evaluation:
            scorer = chooser(how, opened.policy, some)
            return evaluate(some, how, opened.collect, opened.verification.same_answer, scorer=scorer, **hooks)

        yield evaluate_tasks, opened.stop, opened.counts
