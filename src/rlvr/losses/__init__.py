"""Losses: pure functions of the statistics that they declare; they never see logits, models or batches."""

from rlvr.components import Correction, Loss, SequenceLoss, TokenSelector
from rlvr.core.moved import renamed
from rlvr.losses.clip import ClippedPolicyLoss
from rlvr.losses.copg import ContrastiveLoss
from rlvr.losses.correction import Mask, MaskNegatives, Reject, Truncate
from rlvr.losses.covariance import ClipCovLoss, KLCovLoss
from rlvr.losses.dro import QuadraticPenaltyLoss
from rlvr.losses.entropy import EntropyBonus
from rlvr.losses.gmpo import GeometricMeanLoss
from rlvr.losses.inverse_soft_q import InverseSoftQ
from rlvr.losses.kl import Divergence, KLPenalty, absolute, k1, k2, k3
from rlvr.losses.likelihood_loss import ChosenLikelihood, LikelihoodLoss
from rlvr.losses.m2po import SecondMomentLoss
from rlvr.losses.objective import Objective, ObjectiveTerm, Renewal
from rlvr.losses.pacs import RewardClassification
from rlvr.losses.preference import DPO, IPO, KTO
from rlvr.losses.reinforce import Reinforce
from rlvr.losses.rover import RandomPolicyValueLoss
from rlvr.losses.selectors import TopEntropy
from rlvr.losses.self_reward import LastTokenReward, OutcomeClassifier
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch
from rlvr.losses.topr import TaperedLoss
from rlvr.losses.trajectory_balance import TrajectoryBalance
from rlvr.losses.vespo import GammaWeightedLoss
from rlvr.losses.weighted_likelihood import WeightedLikelihood

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "Average",
    "ChosenLikelihood",
    "ClipCovLoss",
    "ClippedPolicyLoss",
    "ContrastiveLoss",
    "Correction",
    "Denominators",
    "Divergence",
    "EntropyBonus",
    "GammaWeightedLoss",
    "GeometricMeanLoss",
    "InverseSoftQ",
    "KLCovLoss",
    "KLPenalty",
    "LastTokenReward",
    "LikelihoodLoss",
    "Loss",
    "LossTerm",
    "Mask",
    "MaskNegatives",
    "Objective",
    "ObjectiveTerm",
    "OutcomeClassifier",
    "QuadraticPenaltyLoss",
    "RandomPolicyValueLoss",
    "Reinforce",
    "Reject",
    "Renewal",
    "RewardClassification",
    "SecondMomentLoss",
    "SequenceBatch",
    "SequenceLoss",
    "TaperedLoss",
    "TokenBatch",
    "TokenSelector",
    "TopEntropy",
    "TrajectoryBalance",
    "Truncate",
    "WeightedLikelihood",
    "absolute",
    "k1",
    "k2",
    "k3",
]

__getattr__ = renamed(__name__, {"Component": "ObjectiveTerm"})
