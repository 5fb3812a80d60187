"""Recipes whose reward is a comparison with other responses: writing-zero, think-rm, pairwise-rl.

The judge is a stub that follows a rule of the test. The strengths and advantages of think-rm are those of github
IlgeeHong/Think-RM, commit 2976ace: PairwiseRLHF/verl/workers/reward_manager/batch_pref.py and
verl/trainer/ppo/core_algos.py, `compute_grpo_difference_advantage`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hand_written_steps import Response, of_the_group, plan_of

from rlvr.records import Task
from rlvr.testing import StubJudge

TASK = Task(id="t", prompt="Write of a river.", answer="bbb")


def by_length(request):
    first, second = (len(request.fenced[name]) for name in ("first", "second"))
    return request.verdict("A" if first > second else "B" if second > first else "tie")


def scored(recipe_step, slug, judge, texts):
    """The batch of one group of these texts."""
    with StubJudge(judge) as stub:
        return recipe_step(slug, [TASK], judge=stub.url).score([[Response(text) for text in texts]])


# writing-zero


def test_a_member_is_the_reference_and_the_others_win_or_lose(recipe_step):
    """1 and -1 against the drawn member, which has 0; the reward is the advantage, without mean and deviation."""
    texts = ["a" * size for size in (4, 1, 7, 2, 6, 3, 5)]
    batch = scored(recipe_step, "writing-zero", by_length, texts)
    advantages = batch.column("advantage").tolist()
    assert advantages.count(0) == 1
    reference = len(texts[advantages.index(0)])
    assert advantages == [float(np.sign(len(text) - reference)) for text in texts]
    assert batch.column("reward").tolist() == advantages


def test_a_judge_that_prefers_a_place_pays_nobody(recipe_step):
    batch = scored(recipe_step, "writing-zero", lambda request: request.verdict("A"), ["a", "bb", "ccc", "dddd"])
    assert batch.column("advantage").tolist() == [0.0] * 4


def test_a_group_that_loses_as_a_whole_is_dropped(recipe_step):
    """All 15 others lose against the reference: a mean of -15/16. With one win it is -13/16, and the group trains."""
    # Orders of the texts in which neither the longest nor the shortest one is drawn: these groups would be dropped.
    orders = [["a" * (1 + (size + first) % 16) for size in range(16)] for first in range(16)]
    batches = [(texts, scored(recipe_step, "writing-zero", by_length, texts)) for texts in orders]
    texts, batch = next((texts, batch) for texts, batch in batches if len(batch))
    reference = texts[batch.column("reward").tolist().index(0)]
    spared = next(text for text in texts if text != reference)

    def prefers(*better):
        def judge(request):
            rank = {
                name: better.index(t) if (t := request.fenced[name]) in better else 9 for name in ("first", "second")
            }
            return request.verdict("A" if rank["first"] < rank["second"] else "B")

        return judge

    assert len(scored(recipe_step, "writing-zero", prefers(reference), texts)) == 0
    batch = scored(recipe_step, "writing-zero", prefers(spared, reference), texts)
    assert sorted(batch.column("advantage").tolist()) == [-1.0] * 14 + [0.0, 1.0]


# think-rm


def strength(request):
    """From -3, the first is much better, to 3: the difference in length, which adds up."""
    first, second = (len(request.fenced[name]) for name in ("first", "second"))
    return f"The longer one tells more.\n<answer>{second - first}</answer>"


def of_the_differences(strengths):
    """`compute_grpo_difference_advantage` of strengths [n, n], where entry (i, j) says how much i is better than j."""
    size = len(strengths)
    deviation = math.sqrt((strengths**2).sum() / (2 * size * (size - 1)) + 1e-6)
    return strengths.sum(axis=1) / size / deviation


def test_advantages_are_those_of_the_authors_where_strengths_add_up(recipe_step):
    texts = ["bb", "dddd", "a", "ccc"]
    lengths = np.asarray([len(text) for text in texts], dtype=float)
    expected = of_the_differences(lengths[:, None] - lengths[None, :])
    batch = scored(recipe_step, "think-rm", strength, texts)
    np.testing.assert_allclose(batch.column("advantage"), expected, rtol=1e-5)
    # The mean strength over the group: of 4 letters against 2, 1 and 3 it is (2 + 3 + 1) / 4.
    np.testing.assert_allclose(batch.column("reward"), [-0.5, 1.5, -1.5, 0.5], rtol=1e-9)


def test_advantages_are_in_proportion_to_the_authors_where_strengths_do_not_add_up(recipe_step):
    """3 for whatever is longer: their deviation is larger, by the same factor for all responses of the group."""

    def always_much(request):
        first, second = (len(request.fenced[name]) for name in ("first", "second"))
        return f"<answer>{-3 if first > second else 3}</answer>"

    texts = ["bb", "dddd", "a", "ccc"]
    lengths = np.asarray([len(text) for text in texts], dtype=float)
    theirs = of_the_differences(3 * np.sign(lengths[:, None] - lengths[None, :]))
    ours = scored(recipe_step, "think-rm", always_much, texts).column("advantage")
    factor = ours / theirs
    np.testing.assert_allclose(factor, factor[0], rtol=1e-9)
    assert 1 < factor[0] < 1.3


def test_a_verdict_that_is_no_strength_leaves_its_pairs_out(recipe_step):
    """Nothing is known of the first response; the others are compared with each other."""

    def silent(request):
        return "I cannot say." if "bb" in request.fenced.values() else strength(request)

    batch = scored(recipe_step, "think-rm", silent, ["bb", "dddd", "a", "ccc"])
    reward = batch.column("reward")
    assert math.isnan(reward[0]) and np.argsort(reward[1:]).tolist() == [1, 2, 0]


def test_the_pairwise_rlhf_has_the_numbers_of_the_authors_script():
    """run_rlhf_multiclass.sh, with ppo_trainer.yaml under it."""
    config = plan_of("think-rm").config
    verifier = config.verifier.options
    assert (verifier["temperature"], verifier["max_tokens"]) == (0.6, 2048)
    shares = {int(label): share for label, share in verifier["labels"].items()}
    assert shares == pytest.approx({s: (3 - s) / 6 for s in (-3, -2, -1, 1, 2, 3)})
    loss = config.algorithm.loss.options
    assert (loss["clip_low"], loss["clip_high"], loss["cap"], loss["average"]) == (0.2, 0.2, 3.0, "tokens")
    assert config.algorithm.entropy == 0
    assert config.data.limit == int(0.03 * 112_052)
    assert 2 * (config.data.limit // config.rollout.prompts_per_step) == 12


# pairwise-rl


def preferring(longer, first):
    """A judge that gives the longer text the log-odds `longer`, and the first one `first` on top."""

    def judge(request):
        one, other = (len(request.fenced[name]) for name in ("first", "second"))
        log_odds = longer * np.sign(one - other) + first
        a = 1 / (1 + math.exp(-log_odds))
        return request.probabilities({"A": a, "B": 1 - a})

    return judge


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_the_reward_is_the_probability_to_beat_the_anchor_over_both_orders(recipe_step, bias):
    """The anchor has three letters. A preference for the first place is the same for all of them."""
    texts = ["a", "bbbb", "ccc", "dd", "eeeee"]
    batch = scored(recipe_step, "pairwise-rl", preferring(2.0, bias), texts)

    def beats(text):
        odds = 2.0 * np.sign(len(text) - len(TASK.answer))
        return (sigmoid(odds + bias) + 1 - sigmoid(-odds + bias)) / 2

    expected = [beats(text) for text in texts]
    np.testing.assert_allclose(batch.column("reward"), expected, rtol=1e-9)
    np.testing.assert_allclose(batch.column("advantage"), of_the_group(expected, 1e-4), rtol=1e-9)
    assert expected[2] == pytest.approx(0.5)
