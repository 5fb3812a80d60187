"""The file with the result of an evaluation."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.errors import ConfigError
from rlvr.monitor.whole_file import write_whole


def is_result(head: str) -> bool:
    """Return True if a file that begins so is one that this command wrote."""
    # As `write_result` lays it out: `{\n "version": 1,\n "model": ...`. Any other file is not overwritten.
    begun = re.match(r'\{\s*"version": \d+,\s*"model": ', head) is not None
    return begun and ('"by_source": ' in head or '"benchmarks": ' in head)


def write_result(result: Mapping[str, Any], output: str | None, lines: Sequence[str]) -> None:
    """Write a result to the file `output`, or print it where there is none, and show `lines`.

    ConfigError where the file cannot be written; the result is printed then, because it may have taken hours.
    """
    text = json.dumps(result, indent=1, allow_nan=False)
    if output is None:
        # Flushed, so that on a terminal the lines for a reader come last.
        print(text, flush=True)
    else:
        path = Path(output)
        try:
            write_whole(path, text + "\n")
        except OSError as error:
            print(text, flush=True)
            raise ConfigError(
                f"--output {output!r} cannot be written: {error}. The result was printed to standard output"
            ) from error
        print(f"results: {path}", file=sys.stderr)
    print("\n".join(lines), file=sys.stderr)
