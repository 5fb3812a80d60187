r"""The comparison of two cleaned answers: trees compared part by part, expressions by their values.

`compare` is the only door. It decides what it understands, and says `None` where the next stage should decide.

Invariants: it never raises; its cost is bounded (tokens, depth, fuel); its verdicts are deterministic. Where the gold
is a plain number, so must the answer be (`Rules.require_simplified`).
"""

from __future__ import annotations

import re

from rlvr.verifiers.math.expression import is_literal, symbols
from rlvr.verifiers.math.guarded_arithmetic import UnknownValueError
from rlvr.verifiers.math.latex import spelling
from rlvr.verifiers.math.letters import is_product_of_letters, read, units_of
from rlvr.verifiers.math.math_answers import Judge
from rlvr.verifiers.math.math_tokens import UnreadableError
from rlvr.verifiers.math.matrices import alike
from rlvr.verifiers.math.node_kinds import Number
from rlvr.verifiers.math.point_sampling import PointSampler
from rlvr.verifiers.math.rules import MathComparison, Rules

__all__ = ["MathComparison", "Rules", "compare"]

# Matches `\log_{10} x`, `\lg x`, `log_10 x`; not `\log x`. Where one side names the base 10, `\log` on the other side
# means it too; else it is natural.
_COMMON_LOG = re.compile(r"\\log_\{?10\b|\\lg\b|\blog_?10\b")
# Matches `abc`; not `ab`, `a b c`.
_LETTERS = re.compile(r"[A-Za-z]{3,}")
"""A word, or an order of letters: no product, so that an anagram is another answer."""
# Matches `H_2O`, `H2O`, `NaCl`; not `h2o`.
_CHEMICAL = re.compile(r"(?:[A-Z][a-z]?(?:_\d|_\{\d+\}|\d+)?)+")
"""A formula of elements and their numbers: `H_2O`, `H2O`."""
_INDEX = re.compile("[_{}]")
# Matches `\text{a}`, `a, b`; not `ab`.
_BETWEEN_LETTERS = re.compile(r"\\(?:text|quad|cdot|mathrm|textbf)(?![A-Za-z])|[\s{}(),*]")
# Matches `maybe 5`, `5?`, `5 or else 6`; not `5`, `x = 5`.
_HEDGE = re.compile(
    r"\b(?:maybe|perhaps|possibly|either|alternatively|probably|not|guess|wrong|incorrect|unless|instead|otherwise"
    r"|else|wait)\b|\?",
    re.IGNORECASE,
)


def compare(gold: str, answer: str, rules: Rules = Rules()) -> MathComparison:  # noqa: B008 - frozen
    """Compare the meaning of the cleaned `answer` with that of the cleaned `gold`; not symmetric: the gold decides the
    form asked for."""
    if spelling(gold) == spelling(answer):
        return MathComparison(True)
    if _CHEMICAL.fullmatch(gold) and _CHEMICAL.fullmatch(answer) and _INDEX.sub("", gold) == _INDEX.sub("", answer):
        return MathComparison(True)
    if not answer:
        return MathComparison(False, "the answer is empty")
    if _LETTERS.fullmatch(gold) and not is_product_of_letters(gold, rules.variables, rules.nouns):
        letters = _BETWEEN_LETTERS.sub("", answer).casefold()
        if sorted(letters) == sorted(gold.casefold()):
            return MathComparison(letters == gold.casefold())
    if _HEDGE.search(answer) and not _HEDGE.search(gold):
        return MathComparison(False, "the answer hedges")
    try:
        expected = read(gold, rules.variables)
    except (UnreadableError, RecursionError) as error:
        return MathComparison(None, f"the gold answer cannot be read here: {error}")
    try:
        tree = read(answer, (rules.variables | symbols(expected)) - units_of(expected))
    except (UnreadableError, RecursionError) as error:
        if rules.require_simplified and (is_literal(expected) or isinstance(expected, Number)):
            return MathComparison(False, f"not a plain number, and the gold is one: {error}")
        return MathComparison(None, f"the answer cannot be read here: {error}")
    if _COMMON_LOG.search(gold) or _COMMON_LOG.search(answer):
        log_base = 10
    else:
        log_base = 0
    try:
        return Judge(rules, PointSampler(log_base)).compare(*alike(expected, tree))
    except (UnknownValueError, RecursionError) as error:
        return MathComparison(None, f"no decision: {error}")
