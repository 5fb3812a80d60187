"""Verdicts and other terms -> named reward columns, and their weighted sum.

`rlvr.rewards.terms` documents how terms are written, built and summed.

| file | terms |
|---|---|
| terms | verdict and its named scores, length, constant, random |
| composition | sum, product, gate, veto, tiers, bounded |
| length_shape | soft_overlong, cosine_length |
| length_group | brevity |
| length_target | length_target |
| repetition | repetition |
| template | format |
| votes | majority_vote |
| certainty | self_certainty, entropy |
| likelihood | answer_likelihood |
| own_likelihood | likelihood |

Terms of a single paper are beside its recipe, in rlvr.recipes.
"""

from rlvr.rewards.certainty import MeanEntropy, SelfCertainty
from rlvr.rewards.composition import Bounded, Gate, Product, Sum, Tiers, Veto
from rlvr.rewards.length_group import Brevity
from rlvr.rewards.length_shape import CosineLength, SoftOverlong
from rlvr.rewards.length_target import LengthTarget
from rlvr.rewards.likelihood import AnswerLikelihood
from rlvr.rewards.own_likelihood import sampled_likelihood
from rlvr.rewards.repetition import Repetition
from rlvr.rewards.template import Format
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
    "AnswerLikelihood",
    "Bounded",
    "Brevity",
    "CosineLength",
    "Format",
    "Gate",
    "LengthTarget",
    "MajorityVote",
    "MeanEntropy",
    "Product",
    "Repetition",
    "RewardContext",
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
