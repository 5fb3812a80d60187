"""Losses: pure functions of the statistics that they declare; they never see logits, models or batches."""

from rlvr.losses.clip import ClippedPolicyLoss
from rlvr.losses.correction import Correction, Mask, Reject, Truncate
from rlvr.losses.entropy import EntropyBonus
from rlvr.losses.kl import KLPenalty, k1, k2, k3
from rlvr.losses.likelihood import LikelihoodLoss
from rlvr.losses.objective import Component, Loss, Objective
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch

__all__ = [
    "Average",
    "ClippedPolicyLoss",
    "Component",
    "Correction",
    "Denominators",
    "EntropyBonus",
    "KLPenalty",
    "LikelihoodLoss",
    "Loss",
    "LossTerm",
    "Mask",
    "Objective",
    "Reject",
    "TokenBatch",
    "Truncate",
    "k1",
    "k2",
    "k3",
]
