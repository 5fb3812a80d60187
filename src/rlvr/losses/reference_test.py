"""The test for a reference in an `algorithm` section, before anything of the stage is built."""

from __future__ import annotations

from rlvr import registry
from rlvr.config import AlgorithmConfig
from rlvr.core.needs import REFERENCE
from rlvr.core.specs import SpecLike


def compares_with_reference(algorithm: AlgorithmConfig) -> bool:
    """Return True if the loss, the KL penalty or a further term asks for the reference; the stage then keeps a copy of
    the weights."""
    # A schedule is never equal to 0.0, so a coefficient that only begins at 0 keeps a reference too.
    if algorithm.kl is not None and algorithm.kl.coef != 0.0:
        return True
    return reads_reference("loss", algorithm.loss) or any(
        reads_reference("auxiliary", spec) for spec in algorithm.auxiliary
    )


def reads_reference(kind: str, spec: SpecLike) -> bool:
    """Return True if a loss as written declares a need of the reference."""
    return any(need.model == REFERENCE for need in registry.build(kind, spec).needs)
