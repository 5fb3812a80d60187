r"""Derivatives and antiderivatives that are not worked out: which letters under them depend on their variable.

The rule, decided here alone: usual names of functions and unknowns do (`f`, `u`, `y`, `\rho`), and a letter that is
differentiated alone; all others are constant factors. So $\frac{d}{dx}(ay)$ is $a\frac{dy}{dx}$, and $\frac{d}{dx}(uv)$
is not $u\frac{dv}{dx}$. Integrals know only names of functions: other letters are parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rlvr.verifiers.math.expression import Binder, Symbol, symbols

_FUNCTIONS = frozenset("fghuvwFGH")
_UNKNOWNS = _FUNCTIONS | frozenset("xyzTVPEBLUS") | {"rho", "phi", "psi", "theta", "sigma", "Phi", "Psi"}


_CONSTANTS = frozenset("abckmnq") | {"pi", "alpha", "beta", "gamma", "epsilon", "kappa", "lambda", "mu"}


def is_constant(name: str) -> bool:
    r"""Return True if a letter under $\nabla$ is a constant; any other is a field."""
    return _base(name) in _CONSTANTS


def _base(name: str) -> str:
    return name.rpartition(" ")[2].partition("_")[0].rstrip("'")


def depends(name: str, kind: str) -> bool:
    """Return True if a letter under an operator of this kind depends on its variable."""
    return _base(name) in (_UNKNOWNS if kind == "diff" else _FUNCTIONS)


def moved(node: Binder, point: Mapping[str, Any], place: Fraction) -> dict[str, Any]:
    """The point where the operator's variable is `place`, and what depends on it has moved along; sums only set their
    variable."""
    place_of = dict(point)
    if node.kind == "diff" or node.kind.endswith("int"):
        for name in symbols(node.body) - {node.variable}:
            if isinstance(point.get(name), Fraction) and (
                depends(name, node.kind) or (node.kind == "diff" and node.body == Symbol(name))
            ):
                place_of[name] = point[name] + Fraction(1 + zlib.crc32(f"{name} {place}".encode()) % 97, 14)
    place_of[node.variable] = place
    return place_of
