"""The evaluation behind python -m rlvr.evaluate: its configuration, its engine, its result."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.config.config_loading import config_tree, load_config, with_imports, with_tasks_of
from rlvr.config.stage_plan import stage_plans
from rlvr.core.own_files import check_output
from rlvr.core.tree import read_mapping
from rlvr.core.waits import StopRequest
from rlvr.data import load_tasks
from rlvr.data.sources import limited
from rlvr.distributed import World
from rlvr.distributed.checkpoint import model_folder
from rlvr.errors import ConfigError
from rlvr.evaluation import Evaluation, compare, contamination, describe, evaluate, read_result
from rlvr.monitor.whole_file import write_whole
from rlvr.records import Task
from rlvr.rollout import CollectionInterruptedError
from rlvr.run.open_sampling import open_sampling
from rlvr.stages.grpo.scoring import chooser
from rlvr.verifiers.raised_verdicts import RaisedVerdicts

WRITTEN = "config.yaml"
"""The path of the configuration in a run folder."""


def evaluate_model(options: argparse.Namespace) -> int:
    """Evaluate as the options of the command say, and write the result; the exit code."""
    config = _config(options)
    spec = options.data or config.evaluation.data or config.data.eval
    if spec is None:
        raise ConfigError("there are no tasks to evaluate on: give --data, or data.eval")
    if options.output is not None:
        check_output(Path(options.output), _is_result, "a result")
    if isinstance(spec, list) and len(spec) == 1:
        spec = spec[0]
    before = None
    if options.compare is not None:
        before = read_result(Path(options.compare))
    # Read here only for its errors; it is read again after sampling, so that it takes no memory in between.
    if options.contamination is not None:  # what cannot be read is refused before the model is sampled
        load_tasks(options.contamination, split="train", fields=config.data.fields)
    tasks = load_tasks(spec, split="eval", fields=config.data.fields)
    tasks = limited(tasks, config.evaluation.limit, config.evaluation.limit_seed)
    world = World.from_environment(config.distributed.heartbeat_timeout)
    try:
        code = _evaluate(config, tasks, world, options, before)
    # Also for Ctrl-C: the other ranks serve their engines until they learn that rank 0 is gone.
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        world.close()
    return code


def _evaluate(config: Config, tasks: list[Task], world: World, options: argparse.Namespace, before: Any) -> int:
    """Sample and write; the exit code. Ranks other than the first lend their engines until it is done."""

    began = time.perf_counter()
    with sampler(config, tasks, world) as (evaluate_tasks, stop):
        if world.is_main:

            def say(done: int, kind: str) -> None:
                print(f"{done}/{len(tasks)} tasks, {kind}, {time.perf_counter() - began:.0f} s", file=sys.stderr)

            refuse = functools.partial(RaisedVerdicts.refuse_all, which="of the evaluation")
            with suppress(CollectionInterruptedError):  # the exit code reports it
                done = evaluate_tasks(said=say, judge=refuse)
        # All ranks meet here; the others have nothing to do before but to serve their engines.
        code = world.broadcast(128 + int(stop.signal) if stop.signal else 0, "the evaluation")
    if code or not world.is_main:
        return code
    result = describe(done, config) | {"seconds": time.perf_counter() - began, "ranks": world.size}
    if options.contamination is not None:
        train = load_tasks(options.contamination, split="train", fields=config.data.fields)
        result["contamination"] = contamination(train, tasks)
    if before is not None:
        result["comparison"] = compare(before, done.task_results, config.evaluation.k)
    _write(result, options.output)
    for name, count in done.raised.raised.items():
        print(
            f"warning: the verifier {name!r} failed on {count} of {done.raised.asked[name]} answers, which are left "
            f"out. What it raised first:\n{done.raised.tracebacks[name]}",
            file=sys.stderr,
        )
    if options.output is not None:
        for name, value in result["results"].items():
            if not name.endswith(" interval") and value is not None:
                low_high = result["results"].get(f"{name} interval")
                span = ""
                if low_high is not None:
                    span = f"  ({low_high[0]:.4g} to {low_high[1]:.4g})"
                print(f"{name:>16}  {value:.4g}{span}", file=sys.stderr)
    return 0


def _config(options: argparse.Namespace) -> Config:
    """The configuration that the options write. ConfigError where they contradict each other."""
    source = options.config
    if source is None and options.model is not None and (folder := _run_folder(options.model)) is not None:
        source = _of_run(folder, options.verifier, options.imports)
    tree: dict[str, Any] = config_tree(source)
    if options.imports:
        tree = with_imports(tree, options.imports)
    base = load_config(tree, options.overrides)
    settings: dict[str, Any] = {"at_start": False, "at_end": False}
    samples = options.samples
    if samples is None:
        # 8 is a choice, for a model that no run's configuration gives a number for.
        samples = base.evaluation.samples or 8
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
        tree["model"] |= {"path": str(model_folder(options.model)), "scratch": None}
    if tree["model"]["path"] is None and tree["model"]["scratch"] is None:
        raise ConfigError("there is no model to evaluate: give --model, a folder or a hub name")
    if not samples and not tree["evaluation"]["greedy"]:
        raise ConfigError("--samples 0 with --no-greedy leaves nothing to evaluate")
    return load_config(tree)


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
    if ks[0] < 1 or ks[-1] > samples:
        wrong = ks[0] if ks[0] < 1 else ks[-1]
        raise ConfigError(f"pass@{wrong} cannot be estimated from {samples} samples: raise --samples, or lower --k")
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
def sampler(
    config: Config, tasks: Sequence[Task], world: World
) -> Iterator[tuple[Callable[..., Evaluation], StopRequest]]:
    """`evaluate` with the sampling of `config`, which only rank 0 may call, and the request to stop."""
    with open_sampling(config, tasks, world) as opened, opened.stop:
        scorer = chooser(config, opened.policy, tasks)
        same_answer = opened.verification.same_answer
        yield functools.partial(evaluate, tasks, config, opened.collect, same_answer, scorer=scorer), opened.stop


def _is_result(head: str) -> bool:
    """Return True if a file that begins so is one that this command wrote."""
    # As `_write` lays it out: `{\n "version": 1,\n "model": ...`. Any other file is not overwritten.
    return re.match(r'\{\s*"version": \d+,\s*"model": ', head) is not None and '"by_source": ' in head


def _write(result: Mapping[str, Any], output: str | None) -> None:
    text = json.dumps(result, indent=1, allow_nan=False)
    if output is None:
        print(text)
        return
    path = Path(output)
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"--output {output!r} cannot be written: {error}") from error
    print(f"results: {path}", file=sys.stderr)
