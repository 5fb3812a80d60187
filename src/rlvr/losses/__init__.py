"""Losses: pure functions of the statistics that they declare; they never see logits, models or batches."""

from rlvr.components import Correction, Loss, SequenceLoss, TokenSelector
from rlvr.core.moved import renamed
from rlvr.losses.clip import ClippedPolicyLoss
from rlvr.losses.correction import Mask, MaskNegatives, Reject, Truncate
from rlvr.losses.covariance import ClipCovLoss, KLCovLoss
from rlvr.losses.kl import Divergence, KLPenalty, absolute, k1, k2, k3
from rlvr.losses.likelihood_loss import ChosenLikelihood, LikelihoodLoss
from rlvr.losses.objective import Objective, ObjectiveTerm, Renewal
from rlvr.losses.preference import DPO, IPO, KTO, OutcomeClassifier
from rlvr.losses.ratio_losses import GammaWeightedLoss, GeometricMeanLoss, QuadraticPenaltyLoss, SecondMomentLoss
from rlvr.losses.reinforce import EntropyBonus, Reinforce, WeightedLikelihood
from rlvr.losses.selectors import TopEntropy
from rlvr.losses.sequences import SequenceBatch
from rlvr.losses.tokens import Average, Denominators, LossTerm, TokenBatch

__getattr__ = renamed(
    __name__,
    {
        "Component": "ObjectiveTerm",
        "ContrastiveLoss": "rlvr.recipes.copg.copg.ContrastiveLoss",
        "InverseSoftQ": "rlvr.recipes.scalable_irl.inverse_soft_q.InverseSoftQ",
        "LastTokenReward": "rlvr.recipes.laser.last_token_loss.LastTokenReward",
        "RandomPolicyValueLoss": "rlvr.recipes.rover.rover.RandomPolicyValueLoss",
        "RewardClassification": "rlvr.recipes.pacs.pacs.RewardClassification",
        "TaperedLoss": "rlvr.recipes.topr.topr.TaperedLoss",
        "TrajectoryBalance": "rlvr.recipes.for_.trajectory_balance.TrajectoryBalance",
    },
)
