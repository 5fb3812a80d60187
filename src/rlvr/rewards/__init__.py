"""Verdicts and other terms -> named reward columns, and their weighted sum.

`rlvr.rewards.terms` documents how terms are written, built and summed.

| file | terms |
|---|---|
| terms | verdict and its named scores |
| controls | length, constant, random |
| span_terms | verdict_spans, turns |
| composition | sum, product, gate, veto, tiers, bounded |
| length_terms | soft_overlong, length_target, brevity |
| form | format, repetition |
| votes | majority_vote |
| certainty | self_certainty, entropy, likelihood |
| likelihood | answer_likelihood |

Terms of a single paper are beside its recipe, in rlvr.recipes.
"""

from rlvr.rewards.certainty import MeanEntropy, SampledLikelihood, SelfCertainty
from rlvr.rewards.composition import Bounded, Gate, Product, Sum, Tiers, Veto
from rlvr.rewards.controls import constant, length, random
from rlvr.rewards.form import Format, Repetition
from rlvr.rewards.length_terms import Brevity, LengthTarget, SoftOverlong
from rlvr.rewards.likelihood import AnswerLikelihood
from rlvr.rewards.span_terms import TurnRewards, VerdictSpans
from rlvr.rewards.terms import (
    RewardContext,
    Term,
    at_step,
    bind,
    build_terms,
    call_plain,
    check,
    components_of,
    paid,
    plain_functions,
    score,
    show_monitored,
    walk,
)
from rlvr.rewards.votes import MajorityVote

__all__ = [
    "AnswerLikelihood",
    "Bounded",
    "Brevity",
    "Format",
    "Gate",
    "LengthTarget",
    "MajorityVote",
    "MeanEntropy",
    "Product",
    "Repetition",
    "RewardContext",
    "SampledLikelihood",
    "SelfCertainty",
    "SoftOverlong",
    "Sum",
    "Term",
    "Tiers",
    "TurnRewards",
    "VerdictSpans",
    "Veto",
    "at_step",
    "bind",
    "build_terms",
    "call_plain",
    "check",
    "components_of",
    "constant",
    "length",
    "paid",
    "plain_functions",
    "random",
    "score",
    "show_monitored",
    "walk",
]
