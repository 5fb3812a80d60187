"""Checking of answers. Importing this room registers the built-in verifiers; it needs neither torch nor SymPy."""

from rlvr.verifiers.base import FunctionVerifier, Needs, Verifier, as_verifier, judged
from rlvr.verifiers.exact import ExactVerifier
from rlvr.verifiers.math import MathVerifier
from rlvr.verifiers.pool import VerifierPool

__all__ = [
    "ExactVerifier",
    "FunctionVerifier",
    "MathVerifier",
    "Needs",
    "Verifier",
    "VerifierPool",
    "as_verifier",
    "judged",
]
