r"""The public suites of mathematical answers, as tasks and completions for MathVerifier.

A suite is a file of JSON lines with `id, gold, pred, expected, mode, opts`. Modes: `pair`, two bare answers; `text`,
two texts with their own delimiters; `completion`, a bare gold and a whole completion. `opts` are the options of
math-verify's own tests; `options_of` maps them to ours.

math_refused.json lists, by id and reason, the cases whose expectation is not ours: they reward a trick, or are
mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED: dict[str, str] = json.loads((Path(__file__).parent / "math_refused.json").read_text())
"""id of a case -> why its expectation is not ours."""


@dataclass(frozen=True)
class Case:
    """One case of a suite; `expected` as the suite has it."""

    id: str
    gold: str
    answer: str
    expected: bool
    mode: str
    opts: dict[str, Any]

    @property
    def completion(self) -> str:
        return f"\\boxed{{{self.answer}}}" if self.mode == "pair" else self.answer

    @property
    def is_ours(self) -> bool:
        """Whether the suite's expectation is ours too."""
        return self.id not in REFUSED


def read_suite(path: Path) -> Iterator[Case]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield Case(row["id"], row["gold"], row["pred"], row["expected"], row["mode"], row.get("opts") or {})


def options_of(case: Case) -> dict[str, Any]:
    """The options of MathVerifier that a case asks for.

    match_types names what is looked for in a text: `latex` is a formula between delimiters, `expr` any number, which
    may have a decimal comma. precision is the number of decimals to which both sides are rounded: two such errors.
    """
    options: dict[str, Any] = {}
    if case.mode == "text":
        kinds = case.opts.get("match_types", ["latex", "expr"])
        options["fallback"] = "last_number" if "expr" in kinds else "last_formula"
        options["decimal_comma"] = kinds == ["expr"]
        options["require_simplified"] = "latex" not in kinds
    if "precision" in case.opts:
        options["tolerance"] = 2 * 10.0 ** -case.opts["precision"]
    if case.opts.get("allow_set_relation_comp") is False:
        options["relation_for_set"] = False
    return options
