"""Multiple choice: which of the task's options an answer names."""

from rlvr.verifiers.choice.choice import ChoiceVerifier

__all__ = ["ChoiceVerifier"]
