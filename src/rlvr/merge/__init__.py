"""python -m rlvr.merge ADAPTER OUT [--base PATH]: write an adapter merged into its base model as a plain model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlvr.core.command_name import program
from rlvr.core.own_files import check_new_folder
from rlvr.errors import command


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    options = make_parser().parse_args(arguments)
    out = Path(options.out)
    check_new_folder(out, "the merged model")
    # After the arguments are checked: torch and peft take seconds to import.
    from rlvr.policy.adapters import merge_adapter

    merge_adapter(options.adapter, options.base, options.out)
    print(f"merged model: {options.out}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(prog=program("merge"), description="Merge a LoRA adapter into its base model.")
    parser.add_argument("adapter", help="a folder with adapter files, for example RUN/checkpoints/step-N/model")
    parser.add_argument("out", help="folder for the merged model, new or empty")
    parser.add_argument("--base", help="folder or hub name of the base model; by default what the adapter says")
    return parser
