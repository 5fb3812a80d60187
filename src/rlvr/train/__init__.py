"""python -m rlvr.train --config FILE|RECIPE [key.path=value ...] [--dry-run [--devices 8x80GB]] [--resume auto|PATH]
[--control random|format]

With `run.seeds` it trains one seed after the other (rlvr.train.sweep). `--control` trains the same run with a reward
that does not depend on the answer: where the held-out score rises as much, the verifier is not the cause.

Exit codes: 0 done, 1 a run that could not go on, 2 bad input, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rlvr.config import Config
from rlvr.config.config_loading import config_file, config_tree, load_config, make_config, recipe_files
from rlvr.config.stage_plan import stage_plans
from rlvr.core.command_name import program
from rlvr.core.startup_lines import StartupLines
from rlvr.core.startup_lines import startup as phases
from rlvr.core.waits import reporting
from rlvr.errors import ConfigError, command

CONTROLS = ("random", "format")
"""Rewards that do not depend on the answer: Shao et al. 2025, "Spurious Rewards", arXiv 2506.10947."""


def as_control(config: Config, reward: str) -> Config:
    """The same run, in a folder of its own, in which `reward` is paid instead of what the configuration says."""
    tree = config.dump()
    # The run may pay the control's reward already, with options: these are kept, since the form is the task's.
    terms = [term.written for term in config.rewards if term.name == reward]  # with its options
    tree["rewards"] = terms[:1] or [reward]
    # A stage may set rewards of its own, which would go over the control's.
    tree["stages"] = [{key: value for key, value in stage.items() if key != "rewards"} for stage in tree["stages"]]
    # Beside the run that it is compared with, which is not to be overwritten.
    tree["run"]["name"] += f"-{reward}"
    return load_config(tree)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    # Overrides may stand between options: `run.steps=5 --dry-run optim.lr=1e-5`.
    options = make_parser().parse_intermixed_args(arguments)
    if options.devices is not None and not options.dry_run:
        raise ConfigError(
            "--devices describes GPUs that need not be here: it goes with --dry-run, a run takes those that are"
        )
    tree = config_tree(options.config, options.overrides)
    if options.dry_run:
        # The plan on standard output may be piped.
        startup = StartupLines("auto" if sys.stderr.isatty() else "off", sys.stderr)
    else:
        startup = StartupLines(_console_mode(tree))
    # Before the check, which loads torch for the classes that are named: seconds.
    startup.say(f"reading {options.config}")
    config = make_config(tree)
    # A published recipe may train on a file that has to be made first.
    is_recipe = config_file(options.config) in recipe_files().values()
    to_make = []
    if is_recipe:
        from rlvr.recipes.prepare import refuse_missing_files

        try:
            refuse_missing_files(config_file(options.config).stem, config)
        except ConfigError as error:
            if not options.dry_run:
                raise
            to_make = [str(error)]
    if options.control is not None:
        config = as_control(config, options.control)
    if config.run.seeds:
        # Imported here, as is the trainer below: `--help` does not wait for torch.
        from rlvr.train.sweep import of_seed, sweep

        if not options.dry_run:
            return sweep(config, options.resume)
        # The runs of all seeds have the same plan.
        config = of_seed(config, config.run.seeds[0])
    if options.dry_run:
        with startup:
            elsewhere = is_recipe or options.devices is not None
            return _dry_run(config, options.devices, elsewhere, to_make)
    return _train(config, options.resume, startup)


def _console_mode(tree: Mapping[str, Any]) -> str:
    """`logging.console` as it is written, which is not checked yet."""
    section = tree.get("logging")
    return str(section.get("console", "auto")) if isinstance(section, Mapping) else "auto"


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("train"), description="Train a policy with verifiable rewards.")
    add = parser.add_argument
    add(
        "--config",
        required=True,
        metavar="FILE|RECIPE",
        help="YAML file (docs/config.md lists its keys), or a published recipe (python -m rlvr.recipes lists them)",
    )
    add("overrides", nargs="*", metavar="key.path=value", help="values that go over the file's")
    add(
        "--dry-run",
        action="store_true",
        help="check the configuration and the tasks that are here, print the resolved configuration, the batch "
        "arithmetic and the memory plan, and stop",
    )
    add(
        "--devices",
        metavar="COUNTxMEMORY",
        help="with --dry-run: plan for these GPUs, which need not be here, such as 8x80GB or 1x24GB",
    )
    add("--resume", metavar="auto|PATH", help="go on from the newest whole checkpoint of the run, or from PATH")
    add(
        "--control",
        choices=CONTROLS,
        help="the reward is drawn at random, or pays the form alone; the run is called NAME-random or NAME-format",
    )
    return parser


def _dry_run(config: Config, devices: str | None, elsewhere: bool, to_make: Sequence[str]) -> int:
    """Print the plan. `elsewhere`: files of tasks need not be here; `to_make` says how they are made."""
    from rlvr.planner import own_devices, parse_devices, plan_for
    from rlvr.run.dry_run import plan_lines
    from rlvr.run.run_tasks import TaskSets
    from rlvr.run.stage_checks import check_stages, make_verifiers, read_tasks_here

    phases.info("planning: stages, tasks and memory")
    plans = stage_plans(config)
    sets = TaskSets()
    check_stages(plans, sets)
    tasks = read_tasks_here(plans, sets, make_verifiers(plans), elsewhere)
    memory: tuple[str, ...]
    ranks = None
    try:
        if devices is None:
            # Under a launcher, as the run itself would find it.
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            plan_devices = own_devices(config.model, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        else:
            plan_devices = parse_devices(devices)
    except ConfigError as error:
        if devices is not None:
            raise
        memory = (f"memory: no plan ({error}); give --devices, such as 1x80GB, to plan for GPUs that are not here",)
    else:
        plan = plan_for(config, plan_devices, ranks)
        config = plan.config
        memory = plan.lines
    print(yaml.safe_dump(config.dump(), sort_keys=False, allow_unicode=True))
    print("\n".join([*plan_lines(config, stage_plans(config), config.folder), *tasks, *to_make, *memory]))
    return 0


def _train(config: Config, resume: str | None, startup: StartupLines) -> int:
    phase = "starting"
    startup.say("loading torch and transformers")
    # SIGUSR1 is answered from the first moment on: without a handler it would end a run that is still loading. `train`
    # has a fuller answer.
    with reporting(lambda: f"run {config.folder}, process {os.getpid()}\nphase: {phase}"):
        from rlvr.run.run_folder import RunFolder
        from rlvr.train.report_at_end import ReportAtEnd
        from rlvr.trainer import GRPOTrainer

        # The trainer finds out only in `train`, whose `resume` may be another: after it has loaded the model.
        RunFolder(config).check_start(resume)
        with startup:
            trainer = GRPOTrainer(config=config, resume=resume, callbacks=[ReportAtEnd()])
        with trainer:
            trainer.train()
            phase = "closing"
            if trainer.stop.signal is not None:
                # As a shell says it: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP.
                return 128 + int(trainer.stop.signal)
    return 0
