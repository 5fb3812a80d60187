"""python -m rlvr.analysis {support, ability, budget, runs, posterior} ...

Prints the table of a published analysis from the files that training and evaluation wrote (docs/analysis.md):

    support BASE TUNED...             tasks kept, gained and lost; pass@k; entropy of answers
    ability MODEL/CONDITION=RESULT... results with and without help in the prompt, by difficulty
    budget --free R... --based R...   verifier-free against verifier-based models at equal tokens
    runs RUN...                       policy entropy, clipping, gradients and held-out results of runs
    posterior MODEL... --config FILE  policies against the posterior pi0 exp(r / beta), by enumeration

Tables are Markdown, or JSON with `--json`. Exit codes: 0 done, 2 bad input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlvr.core.command_name import program
from rlvr.errors import ConfigError, command

if TYPE_CHECKING:
    from rlvr.analysis.analysis_table import AnalysisTable

Options = argparse.Namespace


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    make: Callable[[Options], AnalysisTable] = options.make
    table = make(options)
    print(table.json() if options.json else table.markdown())
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("analysis"), description="Tables of published analyses.")
    commands = parser.add_subparsers(required=True, metavar="TABLE")
    _add_support(commands)
    _add_ability(commands)
    _add_budget(commands)
    _add_runs(commands)
    _add_posterior(commands)
    for subparser in commands.choices.values():
        subparser.add_argument("--json", action="store_true", help="JSON with all digits in place of Markdown")
    return parser


def _add_support(commands: Any) -> None:
    add = _command(commands, "support", _support, "tasks that a tuned model keeps, gains and loses")
    add("base", metavar="BASE", help="the result of the base model: an --output of rlvr.evaluate")
    add("tuned", nargs="+", metavar="TUNED", help="results of tuned models on the same tasks, with as many samples")
    add("--k", metavar="1,8,...", help="the k of pass@k (default: the fewest samples of a task)")


def _add_ability(commands: Any) -> None:
    add = _command(commands, "ability", _ability, "results with and without help in the prompt")
    add("results", nargs="+", metavar="MODEL/CONDITION=RESULT", help="the first condition is the prompt without help")
    add("--metric", default="mean", help="greedy, mean, pass@k, maj@k or best@k (default mean)")


def _add_budget(commands: Any) -> None:
    add = _command(commands, "budget", _budget, "verifier-free against verifier-based models at equal tokens")
    add("--free", nargs="+", required=True, metavar="RESULT", help="of the verifier-free model, one for each length")
    add("--based", nargs="+", required=True, metavar="RESULT", help="of the verifier-based model, one for each length")
    add("--k", metavar="1,8,...", help="responses to a task (default: the k that both results have)")


def _add_runs(commands: Any) -> None:
    add = _command(commands, "runs", _runs, "entropy, clipping, gradients and held-out results of runs")
    add("runs", nargs="+", metavar="RUN", help="a run folder, or the folder of a run over several seeds")
    add("--metric", default="mean", help="of the evaluations: greedy, mean, pass@k, maj@k or best@k (default mean)")
    add("--window", type=_positive, default=10, metavar="N", help="steps at each end that are averaged (default 10)")


def _add_posterior(commands: Any) -> None:
    add = _command(commands, "posterior", _posterior, "policies against pi0 exp(r / beta), by enumeration")
    add("models", nargs="+", metavar="MODEL", help="run folders, checkpoints or model folders to compare")
    add("--config", required=True, metavar="FILE|RECIPE", help="tasks, verifier, length of responses, model")
    add("--base", metavar="MODEL", help="pi0 (default: the model of the configuration)")
    add("--beta", type=float, metavar="B", help="the coefficient of the KL term (default: algorithm.kl.coef)")
    add("--limit", type=_positive, default=8, metavar="N", help="tasks, the first ones (default 8)")
    add("--set", nargs="+", default=[], metavar="key=value", help="settings of the configuration")


def _command(
    commands: Any, name: str, make: Callable[[Options], AnalysisTable], about: str
) -> Callable[..., argparse.Action]:
    subparser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    subparser.set_defaults(make=make)
    return subparser.add_argument


# Modules are imported where they are used: `--help` and a misspelt option do not wait for torch.


def _support(options: Options) -> AnalysisTable:
    from rlvr.analysis.analysis_table import read_evaluated
    from rlvr.analysis.support_dynamics import support_table

    return support_table(read_evaluated(options.base), list(map(read_evaluated, options.tuned)), _ks(options.k))


def _ability(options: Options) -> AnalysisTable:
    from rlvr.analysis.ability import ability_table
    from rlvr.analysis.analysis_table import read_evaluated

    evaluated = {}
    for written in options.results:
        name, equals, path = written.partition("=")
        model, slash, condition = name.partition("/")
        if not (model and slash and condition and equals and path):
            raise ConfigError(f"{written!r} is not written MODEL/CONDITION=RESULT, such as base/plain=base.json")
        if (model, condition) in evaluated:
            raise ConfigError(f"{name} is given twice")
        evaluated[model, condition] = read_evaluated(path)
    return ability_table(evaluated, options.metric)


def _budget(options: Options) -> AnalysisTable:
    from rlvr.analysis.analysis_table import read_evaluated
    from rlvr.analysis.budget import budget_table

    free = list(map(read_evaluated, options.free))
    based = list(map(read_evaluated, options.based))
    return budget_table(free, based, _ks(options.k))


def _runs(options: Options) -> AnalysisTable:
    from rlvr.analysis.run_dynamics import runs_table

    return runs_table(options.runs, options.metric, options.window)


def _posterior(options: Options) -> AnalysisTable:
    from rlvr.analysis.model_posterior import model_posterior
    from rlvr.config.config_loading import load_config

    config = load_config(options.config, options.set)
    beta = options.beta
    if beta is None:
        if config.algorithm.kl is None or not isinstance(config.algorithm.kl.coef, float):
            raise ConfigError("the configuration has no constant algorithm.kl.coef: give --beta")
        beta = config.algorithm.kl.coef
    return model_posterior(config, options.models, options.base, beta, options.limit)


def _ks(written: str | None) -> list[int]:
    if written is None:
        return []
    try:
        return sorted({_positive(part) for part in written.split(",")})
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError(f"--k is a list of numbers from 1 on, like 1,8,64, not {written!r}") from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number
