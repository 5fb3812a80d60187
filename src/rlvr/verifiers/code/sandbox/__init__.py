"""Isolation for programs that a model wrote."""

from rlvr.verifiers.code.sandbox.languages import languages
from rlvr.verifiers.code.sandbox.opening import open_runner

__all__ = ["languages", "open_runner"]
