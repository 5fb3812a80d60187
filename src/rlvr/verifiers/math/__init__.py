"""Mathematical answers: what is written, what it means, and whether two of them mean the same."""

from rlvr.verifiers.math.verifier import MathVerifier

__all__ = ["MathVerifier"]
