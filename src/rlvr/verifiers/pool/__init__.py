"""The pool that runs verifiers: worker processes that can be killed, threads, and an event loop, behind one class."""

from rlvr.verifiers.pool.pool import Verification, VerifierPool, verify_again

__all__ = ["Verification", "VerifierPool", "verify_again"]
