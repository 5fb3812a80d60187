"""python -m stages NUMBER --device cuda|cpu --until TIME --results FILE: one stage, in this process.

Exit codes: 0 the stage came to its end, 1 it raised or a part of it failed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from stages import STAGES
from stages.context import Context, SkipError


def main() -> int:
    """Run the stage; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m stages", description="One stage of the GPU kit, in this process.")
    parser.add_argument("number", type=int, choices=[stage.number for stage in STAGES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--until", type=float, metavar="TIME", help="seconds since the epoch; default: in ten minutes")
    parser.add_argument("--results", type=Path, metavar="FILE", default=Path("stage.jsonl"), help="lines are appended")
    options = parser.parse_args()
    context = Context(options.device, options.until or time.time() + 600, options.results)
    (stage,) = (stage for stage in STAGES if stage.number == options.number)
    try:
        context.describe_machine()
        importlib.import_module(f"stages.{stage.name}").run(context)
    except SkipError as reason:
        context.skip(str(reason))
    except Exception as error:
        context.fail(stage.name, error)
    context.end()
    return 1 if context.failures else 0


if __name__ == "__main__":
    sys.exit(main())
