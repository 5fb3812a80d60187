"""rlvr COMMAND [ARGUMENT ...]: every command of the library; `python -m rlvr` is the same.

    rlvr                            the commands
    rlvr COMMAND --help             the arguments of one, which is also `python -m rlvr.COMMAND`
    rlvr completion bash|zsh|fish   a completion script for a shell, such as: source <(rlvr completion bash)
    rlvr --version

Exit codes: those of the command; 2 for an unknown one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Sequence

from rlvr import __version__
from rlvr.errors import ConfigError, command, nearest

COMMANDS = {
    "train": "train a policy, from a YAML file or a published recipe",
    "evaluate": "evaluate a model on held-out tasks",
    "new": "make a folder with a small task that trains on a CPU",
    "doctor": "what this machine and environment have, and what to install",
    "recipes": "published papers as configurations",
    "report": "write an HTML page of runs",
    "replay": "score recorded rollouts again, with other verifiers or rewards",
    "diff": "find where two runs part",
    "audit": "check a verifier on given completions, and by tricks",
    "merge": "merge a LoRA adapter into its base model",
    "analysis": "tables of published analyses",
}
SHELLS = ("bash", "zsh", "fish")
COMPLETION = "a completion script for a shell"
"""The help of `rlvr completion`, which is no package as the other commands are."""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named first; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        _print(_overview())
        return 0
    name, *rest = words
    if name in ("--version", "-V"):
        print(f"rlvr {__version__}")
        return 0
    if name == "completion":
        return _print_completion(rest)
    if name not in COMMANDS:
        raise ConfigError(f"rlvr has no command {name!r}{nearest(name, [*COMMANDS, 'completion'])}")
    # Read by rlvr.core.command_name, and by the command as its arguments.
    sys.argv[:] = [f"rlvr {name}", *rest]
    runpy.run_module(f"rlvr.{name}", run_name="__main__")
    return 0


def _overview() -> str:
    listed = {**COMMANDS, "completion": COMPLETION}
    width = max(map(len, listed))
    lines = [f"  {name:{width}}  {about}" for name, about in listed.items()]
    return "\n".join(["usage: rlvr COMMAND [ARGUMENT ...]", "", *lines, "", "rlvr COMMAND --help shows its arguments."])


def _print_completion(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(f"rlvr completion takes one shell: {', '.join(SHELLS)}")
    # Imported here: no other command needs it.
    import shtab

    _print(shtab.complete(_all_parsers(), shell=words[0]))
    return 0


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    # A reader such as `head` has what it wanted. What is still buffered goes nowhere, or Python's exit would complain.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _all_parsers() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlvr", description="Reinforcement learning from verifiable rewards.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        module = importlib.import_module(f"rlvr.{name}.__main__")
        own: argparse.ArgumentParser = module.make_parser()
        commands.add_parser(name, parents=[own], help=about, add_help=False)
    shells = commands.add_parser("completion", help=COMPLETION)
    shells.add_argument("shell", choices=SHELLS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
