"""Losses: pure functions of the statistics that they declare; they never see logits, models or batches."""

from rlvr.components import Correction, Loss, SequenceLoss, TokenSelector
from rlvr.losses.clip import ClippedPolicyLoss
from rlvr.losses.correction import Mask, MaskNegatives, Reject, Truncate
from rlvr.losses.covariance import ClipCovLoss, KLCovLoss
from rlvr.losses.kl import Divergence, KLPenalty, absolute, k1, k2, k3
from rlvr.losses.likelihood_loss import ChosenLikelihood, LikelihoodLoss
from rlvr.losses.objective import Objective, ObjectiveTerm, Renewal
from rlvr.losses.preference import DPO, IPO, KTO
from rlvr.losses.ratio_losses import GammaWeightedLoss, GeometricMeanLoss, QuadraticPenaltyLoss, SecondMomentLoss
from rlvr.losses.reinforce import EntropyBonus, Reinforce, WeightedLikelihood
from rlvr.losses.selectors import TopEntropy
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "Average",
    "ChosenLikelihood",
    "ClipCovLoss",
    "ClippedPolicyLoss",
    "Correction",
    "Denominators",
    "Divergence",
    "EntropyBonus",
    "GammaWeightedLoss",
    "GeometricMeanLoss",
    "KLCovLoss",
    "KLPenalty",
    "LikelihoodLoss",
    "Loss",
    "LossTerm",
    "Mask",
    "MaskNegatives",
    "Objective",
    "ObjectiveTerm",
    "QuadraticPenaltyLoss",
    "Reinforce",
    "Reject",
    "Renewal",
    "SecondMomentLoss",
    "SequenceBatch",
    "SequenceLoss",
    "TokenBatch",
    "TokenSelector",
    "TopEntropy",
    "Truncate",
    "WeightedLikelihood",
    "absolute",
    "k1",
    "k2",
    "k3",
]
