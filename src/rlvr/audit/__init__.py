"""python -m rlvr.audit --verifier NAME [key=value ...] --input FILE.jsonl --output FILE.jsonl [--tricks]

Scores a file of completions (one JSON object a line: `completion`, and a task's fields: `id`, `prompt`, `answer`,
`info`, `source` ...) and writes `id, status, score, reason, seconds` per row, in order, as verdicts come. Then it
prints counts, agreement with an `expected` column, the slowest and the doubtful cases. `--tricks` tries the built-in
tricks on the verifier, on the tasks of the input or, without one, on built-in examples.

A frozen model of the verifier is described by options too: `model=rm models.rm.path=FOLDER`.

A row that cannot be read (no JSON, no completion, a field of the wrong type) gets an undecided `error` verdict whose
reason names its line, and the audit goes on; a file without one readable row is refused.

Exit codes: 0 done, 1 a trick was paid or left undecided, or the output could not be written; 2 bad input, 130 after
Ctrl-C, 143 after SIGTERM. What was scored before an interrupt is in the output.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rlvr.config.config_loading import load_config
from rlvr.core.command_name import program
from rlvr.core.own_files import check_output, first_keys
from rlvr.core.tree import as_tree, merge
from rlvr.core.waits import until_signal
from rlvr.data.files import numbered_lines
from rlvr.data.labelled_responses import LabelledRow, read_labelled_rows
from rlvr.errors import ConfigError, DataError, command
from rlvr.monitor.console import Console
from rlvr.monitor.whole_file import naming
from rlvr.records import Verdict
from rlvr.verifiers.audit.examples import examples_for
from rlvr.verifiers.audit.findings import FindingCase, Findings
from rlvr.verifiers.audit.tables import show_findings, show_trial
from rlvr.verifiers.audit.trial import Example, TrickTrial, in_order, try_tricks
from rlvr.verifiers.audit.tricks import TRICKS
from rlvr.verifiers.base import Verifier, as_verifier
from rlvr.verifiers.pool import VerifierPool

# Each task is tried with every trick; more tasks seldom show another hole of the same verifier.
TRIED_TASKS = 8
"""Tasks of an input, the first different ones, that the tricks are tried on."""
VERDICT_KEYS = {"id", "status", "score", "reason", "seconds"}
"""Keys of a line of the output."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_intermixed_args(arguments)
    # Of other libraries only errors: one warning for each of many thousand completions would bury the tables.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rlvr").setLevel(logging.WARNING)
    # Matches modules that do not begin with rlvr or __main__ ("sympy.core"), so that warnings of this library and of
    # the user's own file are shown.
    warnings.filterwarnings("ignore", module=r"(?!rlvr|__main__)")
    verifier = build_verifier(options.verifier, options.options)
    _check_files(options)
    try:
        pool = VerifierPool(workers=options.workers, time_limit=options.time_limit)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with pool:
        return _audit(options, verifier, pool)


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("audit"), description="Check a verifier on given completions.")
    add = parser.add_argument
    add("--verifier", required=True, metavar="NAME", help="a registered name, FILE.py:Class or FILE.py:function")
    add("options", nargs="*", metavar="key=value", help="options of the verifier, values in YAML")
    add("--input", metavar="FILE.jsonl", help="rows with a completion and its task")
    add("--output", metavar="FILE.jsonl", help="where the verdicts go; earlier verdicts there are replaced")
    add(
        "--workers",
        type=int,
        default=32,
        metavar="N",
        help="worker processes (default 32; at most one per core for verifiers that compute)",
    )
    add("--time-limit", type=float, metavar="SECONDS", help="in place of the verifier's own limit")
    add("--tricks", action="store_true", help="try the built-in tricks on the verifier")
    return parser


def build_verifier(name: str, options: Sequence[str]) -> Verifier:
    """The verifier of the command line, with the frozen models that options `models.NAME.key=value` describe.
    ConfigError where it cannot be had."""
    component: Any = {"name": name}
    for option in options:
        component = merge(component, as_tree(option))
    models = component.pop("models", None)
    verifier = as_verifier(component)
    if models is not None:
        # With torch, which other verifiers do without.
        from rlvr.run.loaded_models import LoadedModels

        verifier.attach(LoadedModels(load_config({"models": models}).models))
    return verifier


def _check_files(options: argparse.Namespace) -> None:
    """Refuse impossible requests before any work."""
    if not options.tricks and not (options.input and options.output):
        raise ConfigError("--input and --output are needed (or --tricks, to try the built-in tricks)")
    if options.output and not options.input:
        raise ConfigError("--output is for the verdicts on an --input, which is missing")
    if options.input and not Path(options.input).is_file():
        raise DataError(f"there is no file {options.input!r} to read completions from")
    if options.output:
        # Resolved, so that a link to the input is found too.
        if Path(options.output).resolve() == Path(options.input).resolve():
            raise ConfigError("--output is the --input: it would overwrite the completions")
        check_output(Path(options.output), lambda head: first_keys(head) == VERDICT_KEYS, "a file of verdicts")
        try:
            Path(options.output).parent.mkdir(parents=True, exist_ok=True)
            Path(options.output).open("a").close()  # what is there is replaced once scoring begins
        except OSError as error:
            raise ConfigError(f"--output {options.output!r} cannot be written: {error}") from error


def _audit(options: argparse.Namespace, verifier: Verifier, pool: VerifierPool) -> int:
    """Score, try tricks, and print the findings."""
    console = Console()
    # Progress goes to standard error: the tables may be piped.
    if options.output:
        findings = Findings()
        path = Path(options.input)
        rows = sum(1 for _ in numbered_lines(path))
        progress = Console(file=sys.stderr, counts=lambda: {"verifying": (findings.rows, rows)})
        with (
            naming(options.output),
            open(options.output, "w", encoding="ascii") as sink,
            progress.evaluating(f"scoring {options.input}", None, rows),
        ):
            stopped = until_signal(score(path, verifier, pool, options.verifier, findings, sink))
        show_findings(console, findings)
        if stopped:
            console.message(f"stopped after {findings.rows} rows, which are in {options.output}", "warning")
            return 128 + stopped
        console.message(f"verdicts: {options.output}")
    if not options.tricks:
        return 0
    examples = _checkable(verifier, _examples(options), console)
    judge = functools.partial(pool.verify, verifier)
    trial = TrickTrial()
    Console(file=sys.stderr).message(f"trying {len(TRICKS)} tricks on {len(examples)} tasks")
    stopped = until_signal(try_tricks(judge, examples, options.verifier, trial))
    show_trial(console, trial)
    if stopped:
        return 128 + stopped
    return int(bool(trial.failures))


async def score(
    path: Path, verifier: Verifier, pool: VerifierPool, name: str, findings: Findings, sink: IO[str]
) -> None:
    """Judge the rows of `path`, write each verdict to `sink` in order, and add it to `findings`.

    A verifier that compares a group's answers sees rows of the same task that follow each other as one group.
    """
    readable = 0

    async def judge(rows: Sequence[LabelledRow]) -> list[Verdict]:
        task = rows[0].task
        texts = [row.completion for row in rows]
        if task is None:
            return [Verdict.undecided(rows[0].problem)]
        if len(rows) > 1:
            return await pool.verify_group(verifier, task, texts)
        return [await pool.verify(verifier, task, texts[0])]

    groups = _groups(read_labelled_rows(path), alone=verifier.verify_group is None)
    # The size of the texts bounds how much is under way at once.
    async for rows, verdicts in in_order(groups, judge, lambda rows: sum(len(row.completion) for row in rows)):
        for row, verdict in zip(rows, verdicts, strict=True):
            readable += row.task is not None
            written = {"id": row.id, "status": str(verdict.status), "score": verdict.score, "reason": verdict.reason}
            sink.write(json.dumps({**written, "seconds": round(verdict.seconds, 6)}) + "\n")
            findings.add(FindingCase(str(row.id), name, row.completion, verdict, row.expected, row.task))
        # After each group, so that an interrupt loses no verdict that was reached.
        sink.flush()
    if not readable:
        problem = "it is empty"
        if findings.rows:
            problem = findings.slowest[0].verdict.reason
        raise DataError(f"{path} holds no row that can be read: {problem}")


def _groups(rows: Iterator[LabelledRow], alone: bool) -> Iterator[list[LabelledRow]]:
    """Rows each alone, or those of one task that follow each other together; a row that cannot be read is alone."""
    numbers = itertools.count()

    def key(row: LabelledRow) -> object:
        if alone or row.task is None:
            # A key that differs from every other one: groupby then puts the row into a group of its own.
            return next(numbers)
        return (row.task.prompt, row.task.answer, row.task.info)

    for _, group in itertools.groupby(rows, key):
        yield list(group)


def _examples(options: argparse.Namespace) -> list[Example]:
    """The examples for the tricks: the first different tasks of the input, or built-in ones."""
    if not options.input:
        return examples_for(options.verifier)
    examples: dict[str, Example] = {}
    for row in read_labelled_rows(Path(options.input)):
        if row.task is not None:
            # Rows of one task have different completions; a right one among them (`expected`) is kept as an example
            # that must be paid.
            key = json.dumps([row.task.prompt, row.task.answer, dict(row.task.info)])
            if key in examples or len(examples) < TRIED_TASKS:
                example = examples.get(key, Example(row.task))
                if row.expected:
                    examples[key] = replace(example, completion=row.completion)
                else:
                    examples[key] = example
    if not examples:
        raise DataError(f"{options.input} holds no row that can be read")
    return list(examples.values())


def _checkable(verifier: Verifier, examples: Sequence[Example], console: Console) -> list[Example]:
    """The examples whose task the verifier can check; DataError where it can check none."""
    problems = [(example, verifier.check_task(example.task)) for example in examples]
    refused = [(example.task.id, problem) for example, problem in problems if problem is not None]
    if len(refused) == len(examples):
        raise DataError(f"no task to try the tricks on: {refused[0][0]}: {refused[0][1]}; give rows with --input")
    for task_id, problem in refused:
        console.message(f"task {task_id} is left out, since it cannot be checked: {problem}", "warning")
    return [example for example, problem in problems if problem is None]
