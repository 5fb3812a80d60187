"""Where verifiers run: worker processes that can be killed, threads, and an event loop, behind one class."""

from rlvr.verifiers.pool.pool import VerifierPool

__all__ = ["VerifierPool"]
