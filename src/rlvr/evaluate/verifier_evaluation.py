"""The evaluation of a verifier (a judge, a reward model, a scorer of steps, rules) on labelled rows, behind
python -m rlvr.evaluate --preferences, --steps and --responses."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlvr.config import Config
from rlvr.config.config_loading import config_tree, load_config, with_imports
from rlvr.core.own_files import check_output
from rlvr.core.startup_lines import startup
from rlvr.core.tree import as_tree
from rlvr.core.waits import until_signal
from rlvr.distributed import World
from rlvr.distributed.checkpoint import model_folder
from rlvr.errors import ConfigError, EvaluationError
from rlvr.evaluate.result_file import is_result, write_result
from rlvr.evaluation.preference_results import PREFERENCES, scored_preference
from rlvr.evaluation.response_results import RESPONSES, scored_response
from rlvr.evaluation.result import VERSION, combined, result_lines
from rlvr.evaluation.scored_rows import (
    RowKind,
    ScoredRow,
    mean_over_sources,
    read_row_counts,
    results_by_source,
    row_differences,
    row_results,
)
from rlvr.evaluation.step_results import STEPS, scored_steps
from rlvr.evaluation.verifier_benchmarks import EvaluatedRow, Kind, RowSet, read_row_sets
from rlvr.monitor.console import Console
from rlvr.policy.frozen_model import check_frozen
from rlvr.records import Verdict
from rlvr.run.loaded_models import LoadedModels
from rlvr.run.open_sampling import open_sampling
from rlvr.verifiers.audit.trial import in_order
from rlvr.verifiers.pool import Verification, VerifierPool
from rlvr.verifiers.pool.threads import LoopThread
from rlvr.verifiers.run_models import POLICY

KINDS: dict[Kind, RowKind] = {"preferences": PREFERENCES, "steps": STEPS, "responses": RESPONSES}
OF_MODELS = ("data", "benchmark", "samples", "k", "scorer", "temperature", "max_new_tokens", "contamination")
"""Options that mean nothing here."""
STEP_THRESHOLD = 0.5
"""A step that scores less is rejected, unless --threshold says otherwise: process reward models give probabilities."""
SOURCES_SHOWN = 40


def kind_of(options: argparse.Namespace) -> Kind | None:
    """The kind of labelled rows that the options name; None where a model is evaluated. ConfigError for two kinds."""
    given = [kind for kind in KINDS if getattr(options, kind)]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} are two evaluations: give one of them")
    return given[0] if given else None


def evaluate_verifier(options: argparse.Namespace, kind: Kind) -> int:
    """Evaluate the verifier that the options describe on rows of a kind, and write the result; the exit code."""
    if options.output is not None:
        check_output(Path(options.output), is_result, "a result")
    config = _config(options, kind)
    threshold = options.threshold
    if threshold is None and kind == "steps":
        threshold = STEP_THRESHOLD
    startup.info("reading the rows")
    limits = (config.evaluation.limit, config.evaluation.limit_seed)
    sets = read_row_sets(kind, getattr(options, kind), config.data.fields, *limits)
    before = {}
    if options.compare is not None:
        before = {one.name: read_row_counts(Path(options.compare), KINDS[kind], one.name) for one in sets}
    world = World.from_environment(config.distributed.heartbeat_timeout)
    try:
        with _opened(config, world, with_policy=options.model is not None) as verification:
            code = 0
            if world.is_main:
                results: dict[str, dict[str, Any]] = {}
                code = _evaluate(sets, kind, verification, config, threshold, before, results)
            # The other ranks have served their engines until now.
            code = world.broadcast(code, "the evaluation")
    except BaseException as error:
        world.fail(error)
        raise
    finally:
        world.close()
    if code or not world.is_main:
        return code
    shown = {name: result | {"results": _without_repeats(result["results"])} for name, result in results.items()}
    write_result(combined(results), options.output, [*result_lines(shown), *_source_lines(results, KINDS[kind])])
    return 0


def _config(options: argparse.Namespace, kind: Kind) -> Config:
    """The configuration that the options write: that of --config, with the verifier of --verifier (one of `verifiers`
    by its name, a name of a verifier, or a component), over it the overrides."""
    flags = [name for name in OF_MODELS if getattr(options, name) is not None]
    if options.no_greedy:
        flags.append("no_greedy")
    if flags:
        flag = flags[0].replace("_", "-")
        raise ConfigError(f"--{flag} is of the evaluation of a model, and --{kind} evaluates a verifier: leave it out")
    if kind == "preferences" and options.threshold is not None:
        raise ConfigError("--threshold is for --steps and --responses: preferences compare two scores")
    tree: dict[str, Any] = config_tree(options.config)
    if options.imports:
        tree = with_imports(tree, options.imports)
    if options.verifier is not None:
        named = tree.get("verifiers") or {}
        tree["verifier"] = named.get(options.verifier) or as_tree(f"verifier={options.verifier}")["verifier"]
    base = load_config(tree, options.overrides)
    if base.verifier is None:
        raise ConfigError("there is no verifier to evaluate: give --verifier")
    if options.model is None and base.verifier.options.get("backend") == POLICY:
        raise ConfigError("the verifier's `backend: policy` is the model of --model, which is not given")
    tree = base.dump()
    # What else a configuration has may name servers that are not asked here.
    tree["verifiers"] = {}
    if options.limit is not None:
        tree["evaluation"]["limit"] = options.limit
    if options.seed is not None:
        tree["run"]["seed"] = options.seed
    if options.engine is not None:
        tree["rollout"]["engine"] = options.engine
    if options.model is not None:
        tree["model"] |= {"path": str(model_folder(options.model)), "scratch": None}
    return load_config(tree)


@contextmanager
def _opened(config: Config, world: World, with_policy: bool) -> Iterator[Verification]:
    """The verification of `config` with its frozen models and, on request, the engine of its model as the policy."""
    if with_policy:
        with open_sampling(config, [], world) as opened, opened.stop:
            yield opened.verification
        return
    check_frozen(config.models)
    checks = config.verification
    loop = LoopThread("verifier-models")
    try:
        with VerifierPool(checks.workers, checks.time_limit, checks.memory_mb, checks.concurrent) as pool:
            verification = Verification(config.verifier, pool)
            if world.is_main:
                startup.info("opening the verifier")
                verification.attach(LoadedModels(config.models, config.run.seed, submit=loop.submit))
            yield verification
    finally:
        loop.stop()


def _evaluate(
    sets: Sequence[RowSet],
    kind: Kind,
    verification: Verification,
    config: Config,
    threshold: float | None,
    before: Mapping[str, Mapping[str, Mapping[str, float]]],
    results: dict[str, dict[str, Any]],
) -> int:
    """Put the result on each set into `results`, by its name, compared with the counts `before`, by name and id; the
    exit code, which is not 0 after a signal."""
    verification.check([row.task for one in sets for row in one.rows])
    assert config.verifier is not None
    for one in sets:
        began = time.perf_counter()
        rows: list[ScoredRow] = []
        stopped = _score(one, kind, verification, threshold, rows)
        if stopped:
            return 128 + stopped
        by_source = results_by_source(rows, KINDS[kind])
        result = results[one.name] = {
            "version": VERSION,
            "model": config.model.path,
            "verifier": config.verifier.written,
            "models": {name: model.path or model.url for name, model in config.models.items()},
            "rows": kind,
            "data": dict(one.data),
            "threshold": threshold,
            "results": row_results(rows, KINDS[kind]),
            "by_source": by_source,
            "mean_over_sources": mean_over_sources(by_source) if len(by_source) > 1 else {},
            "seconds": time.perf_counter() - began,
        }
        if one.benchmark is not None:
            how = one.benchmark.model_dump(include={"title", "source", "differs"})
            result["benchmark"] = {"name": one.name, **how}
        if one.name in before:
            result["comparison"] = row_differences(before[one.name], rows, KINDS[kind])
        result["by_task"] = [row.to_json() for row in rows]
    return 0


def _score(
    one: RowSet, kind: Kind, verification: Verification, threshold: float | None, scored: list[ScoredRow]
) -> int:
    """Score the rows of a set, in order; 0, or the number of the signal that stopped it. EvaluationError where no row
    has a verdict."""
    score = _scorer(one, kind, threshold)
    console = Console(file=sys.stderr, counts=lambda: {"verifying": (len(scored), len(one.rows))})
    reasons: list[str] = []

    async def judge(row: EvaluatedRow) -> list[Verdict]:
        assert row.task is not None
        verifier = verification.of(row.task)
        return await verification.pool.verify_group(verifier, row.task, row.responses)

    async def work() -> None:
        async for row, verdicts in in_order(one.rows, judge, lambda row: sum(map(len, row.responses))):
            reasons.extend(verdict.traceback or verdict.reason for verdict in verdicts if not verdict.decided)
            del reasons[1:]
            scored.append(score(row, verdicts))

    with console.evaluating(one.name, len(one.rows), len(one.rows)):
        stopped = until_signal(work())
    if not stopped and all(row.counts["undecided"] == 1 for row in scored):
        raise EvaluationError(f"the verifier decided no row of {one.name}. What it said first: {reasons[0].strip()}")
    return stopped


def _scorer(one: RowSet, kind: Kind, threshold: float | None) -> Callable[[Any, Sequence[Verdict]], ScoredRow]:
    """The function of a row and its verdicts that gives the scored row."""
    match kind:
        case "preferences":
            styled = one.benchmark is not None and one.benchmark.styled
            return lambda row, verdicts: scored_preference(row, verdicts, styled)
        case "responses":
            return lambda row, verdicts: scored_response(row, verdicts[0], threshold)
        case "steps":
            assert threshold is not None
            least = threshold

            def steps(row: Any, verdicts: Sequence[Verdict]) -> ScoredRow:
                (verdict,) = verdicts
                # A text of blank steps alone has no spans.
                if verdict.decided and not verdict.spans and any(map(str.strip, row.steps)):
                    raise ConfigError(
                        "--steps needs a verifier that scores steps (Verdict.spans), such as step_scorer or steps, and "
                        "this one scores whole responses"
                    )
                return scored_steps(row, verdict, least)

            return steps


def _without_repeats(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results for the screen: those that count undecided rows as wrong only where there are such rows."""
    if results["undecided"]:
        return dict(results)
    return {name: value for name, value in results.items() if "_of_all" not in name}


def _source_lines(results: Mapping[str, Mapping[str, Any]], kind: RowKind) -> list[str]:
    """The main result for each source of sets that have several, for a reader."""
    lines = []
    for name, result in results.items():
        label = f"{name} " if len(results) > 1 else ""
        by_source = result["by_source"]
        if len(by_source) < 2:
            continue
        for source, of_source in list(by_source.items())[:SOURCES_SHOWN]:
            value = of_source.get(kind.main)
            shown = "no value" if value is None else f"{100 * value:.1f} %"
            lines.append(f"{label}{source}: {kind.main} {shown} of {of_source['tasks']} rows")
        mean = result["mean_over_sources"].get(kind.main)
        if mean is not None:
            lines.append(f"{label}mean over {len(by_source)} sources: {kind.main} {100 * mean:.1f} %")
    return lines
