"""Tool calls: reading them from a completion, and comparing them with the calls that a task wants."""

from rlvr.verifiers.tool_calls.tool_call_verifier import ToolCallVerifier

__all__ = ["ToolCallVerifier"]
