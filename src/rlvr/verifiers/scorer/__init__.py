"""The verifiers that ask a frozen model for scores: importing this package registers them."""

from rlvr.verifiers.scorer.scorer_verifier import ScorerVerifier as ScorerVerifier
from rlvr.verifiers.scorer.step_scorer_verifier import StepScorerVerifier as StepScorerVerifier
