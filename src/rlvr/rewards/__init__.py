"""Verdicts and other terms -> named reward columns, and their weighted sum.

`rlvr.rewards.terms` documents how terms are written, built and summed.

| file | terms |
|---|---|
| terms | verdict and its named scores, length, constant, random |
| composition | sum, product, gate, veto, tiers, by_pass_rate, by_condition, bounded |
| length_shape | soft_overlong, cosine_length |
| length_group | brevity |
| length_target | length_target, adaptive_length_target |
| repetition | repetition |
| template | format, no_thinking |
| ranks | rank_overlap |
| votes | majority_vote |
| certainty | self_certainty, entropy, phase_entropy |
| likelihood | answer_likelihood, self_aligned, last_token |
| own_likelihood | likelihood |
"""

from rlvr.core.moved import renamed
from rlvr.rewards.certainty import MeanEntropy, PhaseEntropy, SelfCertainty
from rlvr.rewards.composition import Bounded, ByCondition, ByPassRate, Gate, Product, Sum, Tiers, Veto
from rlvr.rewards.length_group import Brevity
from rlvr.rewards.length_shape import CosineLength, SoftOverlong
from rlvr.rewards.length_target import AdaptiveLengthTarget, LengthTarget
from rlvr.rewards.likelihood import AnswerLikelihood, LastTokenScore, SelfAligned
from rlvr.rewards.own_likelihood import sampled_likelihood
from rlvr.rewards.ranks import RankOverlap
from rlvr.rewards.repetition import Repetition
from rlvr.rewards.template import Format, NoThinking
from rlvr.rewards.terms import (
    RewardContext,
    Term,
    TermSpec,
    VerdictScore,
    at_step,
    bind,
    build_terms,
    call_plain,
    components_of,
    constant,
    length,
    paid,
    plain_functions,
    random,
    score,
    walk,
)
from rlvr.rewards.votes import MajorityVote

__all__ = [
    "AdaptiveLengthTarget",
    "AnswerLikelihood",
    "Bounded",
    "Brevity",
    "ByCondition",
    "ByPassRate",
    "CosineLength",
    "Format",
    "Gate",
    "LastTokenScore",
    "LengthTarget",
    "MajorityVote",
    "MeanEntropy",
    "NoThinking",
    "PhaseEntropy",
    "Product",
    "RankOverlap",
    "Repetition",
    "RewardContext",
    "SelfAligned",
    "SelfCertainty",
    "SoftOverlong",
    "Sum",
    "Term",
    "TermSpec",
    "Tiers",
    "VerdictScore",
    "Veto",
    "at_step",
    "bind",
    "build_terms",
    "call_plain",
    "components_of",
    "constant",
    "length",
    "paid",
    "plain_functions",
    "random",
    "sampled_likelihood",
    "score",
    "walk",
]

__getattr__ = renamed(__name__, {"Setting": "RewardContext"})
