"""Verifiers that ask a language model: importing this package registers them."""

from rlvr.verifiers.judge.judge_verifier import JudgeVerifier as JudgeVerifier
