"""SAR: the verdict, and by how much the question lowers the response's perplexity (arXiv 2509.05489).

amazon-science/Self-Aligned-Reward-Towards_Effective_and_Efficient_Reasoners@08892d0 verl/utils/reward_score/
efficiency_reward.py, compute_ppl_qa_log: max((A - QA) / A, -1), QA the perplexity of a response after the question, A
that without it (verl/trainer/ppo/ray_trainer.py: exp of minus the mean log-prob). scripts/SA-grpo-4B.sh: weights 1 and
0.2, no division by the group's deviation, loss_agg_mode seq-mean-token-sum-norm over 4,096 tokens, KL 0.001 of
low_var_kl; ppo_trainer.yaml: clip 0.2 and clip_ratio_c 3. The verdict is that of the last number of a response
(verl/utils/global_tools.py, extract_answer).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import (
    BEFORE,
    ENGINE,
    MOVED,
    PROMPT,
    Response,
    clipped_gradient,
    k3_gradient,
    plan_of,
    policy_gradient,
)

from reward_helpers import make_batch
from rlvr import registry
from rlvr.data import Template
from rlvr.policy.statistics import encoded
from rlvr.recipes.sar.self_aligned import SelfAligned
from rlvr.records import Task

TASK = Task(id="t", prompt="What is 2 + 2?", answer="4")
LONGEST = 4096
KL = 0.001
# (text, right, perplexity after the question, perplexity without it)
RESPONSES = [
    ("2 + 2 = 4. \\boxed{4}", True, 1.5, 6.0),
    ("\\boxed{4}", True, 1.1, 11.0),
    ("so " * 100 + "\\boxed{4}", True, 1.5, 1.6),
    ("Two and two make \\frac{8}{2}.", True, 2.0, 8.0),
    ("A poem of 9 seas. 4", True, 4.0, 4.0),
    ("2 + 2 = 5. \\boxed{5}", False, 2.0, 8.0),
    ("so " * 100, False, 1.2, 1.2),
    ("Roses are red.", False, 6.0, 4.0),
    ("\\boxed{4} in step 2.", False, 50.0, 5.0),
    ("", False, 3.0, 4.0),
]


def reward(right, after, alone):
    return right + 0.2 * max((alone - after) / alone, -1.0)


IDS = [(0, 1, 2, 3), (1,), (2, 1, 2), (0, 0), (3,), (3, 2, 1), (2, 2), (0,), (0, 3), (2,)]
"""Tokens of the ten responses, which tell them apart."""


@pytest.fixture
def step(recipe_step, monkeypatch):
    """The recipe's step under a policy to which the responses have these perplexities; `contexts` are what they were
    scored after."""
    contexts = []

    def logprobs(policy, asked, config):
        answers = []
        for context, target in asked:
            _, _, after, alone = RESPONSES[IDS.index(tuple(target))]
            nats = math.log(after if list(context) == [PROMPT] else alone)
            contexts.append(tuple(context))
            # Uneven over the tokens: the perplexity is of their mean.
            answers.append(-nats + np.linspace(-0.5, 0.5, len(target)) if len(target) > 1 else np.asarray([-nats]))
        return answers

    monkeypatch.setattr("rlvr.stages.grpo.scoring.continuation_logprobs", logprobs)
    opened = recipe_step("sar", [TASK])
    opened.contexts = contexts
    return opened


def group(*numbers):
    return [Response(RESPONSES[n][0], IDS[n]) for n in numbers]


def rewards_of(*numbers):
    return [reward(*RESPONSES[n][1:]) for n in numbers]


def test_ten_responses(step):
    batch = step.score([group(*range(10))])
    expected = rewards_of(*range(10))
    np.testing.assert_allclose(batch.column("reward"), expected, rtol=1e-9)
    # Within one group: less its mean, in the reward's own unit.
    np.testing.assert_allclose(batch.column("advantage"), np.asarray(expected) - np.mean(expected), rtol=1e-9)


def test_what_the_paper_singles_out(step):
    """Of right answers the concise one to this question is best and one that says little of it worse; no alignment
    makes a wrong answer better than a right one that has nothing to do with the question."""
    concise, padded, elsewhere, wrong = step.score([group(1, 2, 4, 5)]).column("advantage")
    assert concise > padded > elsewhere > 0 > wrong


CHOSEN = (0, 2, 3, 5, 6, 8)


def centred():
    rewards = rewards_of(*CHOSEN)
    return [r - sum(rewards) / len(rewards) for r in rewards]


@pytest.mark.parametrize("moved", [False, True])
def test_gradient(step, moved):
    """Sums over tokens divided by 4,096, of the clipped ratio to the policy before the update and of the KL; the
    engine's log-probs say nothing."""
    ids = [IDS[n] for n in CHOSEN]
    share = sum(map(len, ids)) / (len(ids) * LONGEST)
    got = step.gradient(
        step.score([group(*CHOSEN)]), MOVED, old=BEFORE if moved else None, reference=BEFORE, engine=ENGINE
    )
    if moved:
        policy = clipped_gradient(centred(), ids, MOVED, BEFORE, "constant", cap=3.0, longest=LONGEST)
    else:
        policy = share * policy_gradient(centred(), ids, MOVED, "tokens")
    expected = policy + KL * share * k3_gradient(ids, MOVED, BEFORE, "tokens")
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_the_norm_is_cut_where_the_authors_cut_that_of_their_sum():
    """Their gradient is the sum over the 4 responses of a micro-batch (16 on 4 devices), cut to norm 1."""
    limit = plan_of("sar").config.optim.max_grad_norm
    for norm in (0.01, 0.2, 0.3, 5.0):
        assert 4 * min(limit, norm) == pytest.approx(min(1.0, 4 * norm))


def test_the_other_context_is_the_prompt_without_its_question(step):
    """create_ans_only_batch: the template of Qwen3 with the same system message and an empty turn of the user."""
    config = plan_of("sar").config
    system = Template.parse(config.data.template).system
    turns = [("system", system), ("user", "")]
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns) + "<|im_start|>assistant\n"
    assert config.rewards[1].options["before"] == text
    step.score([group(0, 1)])
    after, alone = (set(step.contexts[start::2]) for start in (0, 1))
    assert after == {(PROMPT,)}
    assert alone == {tuple(encoded(step.stage.context.policy, text))}


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("so 1/2 is \\frac{1}{2}", "\\frac{1}{2}", True),
        ("so 0.5", "\\frac{1}{2}", True),
        ("so -\\frac{ 1 }{ 2 }", "-0.5", True),
        # Their patterns find 2, 2 and 000 here.
        ("so 1/2", "\\frac{1}{2}", False),
        ("so \\dfrac{1}{2}", "\\frac{1}{2}", False),
        ("so 1,000", "1000", False),
        ("so 1000 units.", "1,000", True),
        ("- 7 is it", "7", True),
        ("it is 7 - or 8?", "7", False),
        ("the root", "7", False),
    ],
)
def test_the_last_number_or_fraction_is_the_answer(text, gold, right):
    verifier = registry.build("verifier", plan_of("sar").config.verifier)
    assert verifier.verify(Task("t", "?", gold), text).score == float(right)


def encode(text):
    return [ord(c) for c in text] or [0]


def test_the_drop_in_perplexity():
    """With the prompt 0.5 each, ppl 2; without 0.25, ppl 4: a half less. Worse with the prompt: below 0, at least
    -1."""
    piece, batch = SelfAligned(), make_batch([1.0] * 3, [2, 0, 1])
    asked = piece.asks(batch, encode)
    assert [(c.rollout, len(c.context)) for c in asked] == [(0, 2), (-1, 1), (2, 2), (-3, 1)]
    assert [list(c.context) for c in SelfAligned(before="ab").asks(batch, encode)[1::2]] == [[97, 98]] * 2
    logprobs = [np.log([0.5, 0.5]), np.log([0.25, 0.25]), np.log([0.001]), np.log([0.5])]
    got = piece(batch, list(zip(asked, logprobs, strict=True)))
    np.testing.assert_allclose(got, [0.5, np.nan, -1])
