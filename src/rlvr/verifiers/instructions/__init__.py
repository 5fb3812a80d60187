"""Instruction following: the 25 constraint kinds of IFEval (arXiv 2311.07911), each a pure function of the text.

The constraints register themselves when this package is imported. `instruction_registry.CONSTRAINTS` holds them by
the id that the public data uses. The further kinds of IFBench and IF-RLVR are not here.
"""

from rlvr.verifiers.instructions import constraints as constraints
from rlvr.verifiers.instructions.instructions_verifier import InstructionsVerifier

__all__ = ["InstructionsVerifier"]
