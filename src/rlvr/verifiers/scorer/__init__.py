"""The verifier that asks a frozen model for a score: importing this package registers it."""

from rlvr.verifiers.scorer.scorer_verifier import ScorerVerifier as ScorerVerifier
