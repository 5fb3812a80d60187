"""Programs that a model wrote, run in isolation and compared outside it."""

from rlvr.verifiers.code.code_verifier import CodeVerifier

__all__ = ["CodeVerifier"]
