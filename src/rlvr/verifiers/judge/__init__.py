"""Verifiers that ask a language model: importing this package registers them."""

from rlvr.verifiers.judge.judge_verifier import JudgeVerifier as JudgeVerifier
from rlvr.verifiers.judge.pairwise_verifier import PairsVerifier as PairsVerifier
from rlvr.verifiers.judge.rubric_verifier import RubricVerifier as RubricVerifier
from rlvr.verifiers.judge.steps_verifier import StepsVerifier as StepsVerifier
