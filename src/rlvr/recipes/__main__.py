"""python -m rlvr.recipes: the published recipes that there is a configuration for.

    python -m rlvr.recipes                        list them
    python -m rlvr.recipes search length penalty  those whose text has all the words
    python -m rlvr.recipes show SLUG [--diff grpo]
    python -m rlvr.recipes path SLUG              print the path of its file
    python -m rlvr.recipes prepare SLUG [--limit N] [key.path=value ...]
                                                  make the files that it trains on
    python -m rlvr.recipes smoke SLUG... [--against grpo]

`python -m rlvr.train --config SLUG` trains with one.

Exit codes: 0 done, 1 a smoke run that failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import yaml

from rlvr import registry
from rlvr.config.config_loading import config_file, make_config
from rlvr.config.stage_plan import stage_plans
from rlvr.core.command_name import program
from rlvr.errors import RlvrError, command
from rlvr.recipes.hub_schemas import schema_lines
from rlvr.recipes.papers import Paper, find_paper, read_papers
from rlvr.recipes.prepare import prepare


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    if options.command == "show":
        paper = find_paper(options.slug)
        for text in [_diff(paper)] if options.diff else _shown(paper):
            print(text, flush=True)
        return 0
    if options.command == "path":
        print(config_file(options.slug))
        return 0
    if options.command == "prepare":
        for line in prepare(find_paper(options.slug), options.limit, options.overrides):
            print(line)
        return 0
    if options.command == "smoke":
        papers = [find_paper(slug) for slug in options.slugs]
        return max(_smoke(paper, bool(options.against)) for paper in papers)
    _list(read_papers(), [word.lower() for word in options.words])
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("recipes"), description="Published recipes as configurations.")
    parser.set_defaults(words=[])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="all recipes")
    search = commands.add_parser("search", help="recipes whose text has all these words")
    search.add_argument("words", nargs="+")
    show = commands.add_parser("show", help="what a recipe is, and its configuration")
    show.add_argument("slug")
    show.add_argument(
        "--diff", choices=["grpo"], help="only what differs from plain GRPO, in the resolved configuration"
    )
    path = commands.add_parser("path", help="the path of a recipe's file, such as for a copy of your own")
    path.add_argument("slug")
    made = commands.add_parser("prepare", help="make the files that a recipe trains on")
    made.add_argument("slug")
    made.add_argument("--limit", type=_at_least_one, metavar="N", help="at most so many rows of each file")
    made.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of what samples, if any does")
    smoke = commands.add_parser("smoke", help="a few steps at toy size")
    smoke.add_argument("slugs", nargs="+", metavar="SLUG")
    smoke.add_argument(
        "--against",
        choices=["grpo"],
        help="how far the gradient is from plain GRPO's on the same rollouts (without reinforcement: the plain "
        "likelihood's)",
    )
    return parser


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number of 1 or more, not {text!r}")
    return number


def _list(papers: Iterable[Paper], words: Sequence[str]) -> None:
    found = []
    for paper in papers:
        text = yaml.safe_dump([paper.slug, paper.recipe.model_dump(exclude={"smoke"}), paper.tree]).lower()
        if all(word in text for word in words):
            found.append(paper)
    if not found:
        print(f"no recipe has all of these words: {' '.join(words)}")
    width = max((len(paper.slug) for paper in found), default=0)
    for paper in found:
        print(f"{paper.slug:{width}}  {paper.recipe.status:8}  {paper.recipe.title}")


def _shown(paper: Paper) -> Iterator[str]:
    """The lines of `show`, the first ones before torch is loaded."""
    words = {
        name: getattr(paper.recipe, name) for name in ("source", "taken", "differs", "checked", "missing", "effect")
    }
    yield from (paper.recipe.title, f"status: {paper.recipe.status}")
    lines = itertools.chain((f"{name}: {text}" for name, text in words.items() if text), _correction_lines(paper))
    yield from (textwrap.fill(line, 110, subsequent_indent="  ") for line in lines)
    # Not wrapped: a command or a row is to be copied as it is.
    yield from schema_lines(paper)
    yield ""
    yield _yaml(paper.tree)


def _correction_lines(paper: Paper) -> Iterator[str]:
    """The line of `show` about a correction that no one wrote down: `algorithm.correction` is auto, and the engine
    samples with weights of its own."""
    from rlvr.planner.engine_memory import shares_weights
    from rlvr.stages.grpo.build_objective import build_objective

    corrected = []
    for plan in stage_plans(paper.config):
        spec = plan.config.algorithm.correction
        if plan.kind != "grpo" or spec is None or spec.name != "auto":
            continue
        engine = registry.build("engine", plan.config.rollout.engine)
        objective = build_objective(plan, shares_weights(engine, plan.config))
        if objective.correction is not None:
            corrected.append(f"{plan.name}: {objective.correction}")
    if corrected:
        yield (
            f"correction: algorithm.correction is auto, so that the engine {paper.config.rollout.engine.name}, which "
            "samples with weights of its own, switches on a correction of the log-probs that the paper may not have "
            f"({'; '.join(corrected)}); `algorithm.correction=null` leaves it out"
        )


def _diff(paper: Paper) -> str:
    """A unified diff from a GRPO run with the same model, data and sizes to the resolved configuration."""
    own = paper.config.dump()
    # Sections that are no part of an algorithm: in them both have the recipe's values, so that they are not in the
    # diff.
    kept = ("run", "model", "data", "distributed", "evaluation", "checkpoint", "logging")
    plain = {name: own[name] for name in kept} | {"optim": {"lr": own["optim"]["lr"]}}
    sizes = ("engine", "prompts_per_step", "group_size", "max_new_tokens")
    plain["rollout"] = {name: own["rollout"][name] for name in sizes}
    base = make_config(plain).dump()
    lines = difflib.unified_diff(
        _yaml(base).splitlines(), _yaml(own).splitlines(), "grpo", paper.slug, lineterm="", n=1
    )
    return "\n".join(lines)


def _yaml(tree: object) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110)


def _smoke(paper: Paper, against: bool) -> int:
    from rlvr.recipes.smoke import against_grpo, smoke

    try:
        for row in smoke(paper):
            values = {key: row[key] for key in ("reward/mean", "loss/total", "grad_norm")}
            numbers = " ".join(
                f"{key} {'-' if value is None else format(value, '.4g')}" for key, value in values.items()
            )
            print(f"{paper.slug}: {row['run/stage']} step {row['step']}: {numbers}")
        if against:
            for name, apart in against_grpo(paper).items():
                if any(plan.kind != "sft" for plan in stage_plans(paper.config)):
                    plain = "grpo"
                else:
                    plain = "sft"
                print(
                    f"{paper.slug} against {plain}, {name}: gradient {apart.norm:.4g} against {apart.plain_norm:.4g}, "
                    f"cosine {apart.cosine:.4f}, difference {apart.relative:.4g} of {plain}'s"
                )
    except RlvrError as error:
        print(f"{paper.slug}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
