"""Mathematical answers: what is written, what it means, and whether two of them mean the same."""

from rlvr.verifiers.math.math_verifier import MathVerifier

__all__ = ["MathVerifier"]
