"""Labels from votes, the form of a response, and how sure the policy is, against values worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from reward_helpers import make_batch, make_rollout

from rlvr.config import Config
from rlvr.errors import ConfigError
from rlvr.records import Batch, Task
from rlvr.rewards import RewardContext, bind, build_terms, score


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


# votes


def voted(column, answers, scores=None, groups=None, **options):
    batch = make_batch(scores or [0.0] * len(answers), groups=groups, answers=answers)
    return column(batch, {"name": "majority_vote", **options})


def test_the_majority_is_right_whatever_the_verdict(column, nan):
    close(voted(column, ["3", "4", "3", None]), [1, 0, 1, 0])
    close(
        voted(column, ["3", "4", "3"], [0.0, 1.0, None]), [0.5, 0.5, nan]
    )  # an undecided verdict has no answer: a tie of two
    close(voted(column, ["3", "4"]), [0.5, 0.5])
    close(voted(column, ["3", "4", "4", "3", "5"]), [0.5, 0.5, 0.5, 0.5, 0])
    close(voted(column, [None, None]), [nan, nan])
    close(voted(column, ["7"]), [1])
    close(voted(column, ["3", "3", "1", "1", "1"], groups=["a", "a", "b", "b", "b"]), [1] * 5)


def test_a_share_is_a_soft_label_and_a_weak_majority_is_no_label(column, nan):
    close(voted(column, ["3", "4", "3", None], of="share"), [2 / 3, 1 / 3, 2 / 3, 0])
    close(voted(column, ["3", "4", "3"], at_least=0.7), [nan] * 3)
    close(voted(column, ["3", "4", "3"], at_least=0.6), [1, 0, 1])


def test_a_group_of_hundreds_votes(column):
    answers = [str(i % 10) for i in range(300)] + ["3"]
    got = voted(column, answers)
    assert got.sum() == 31
    assert all(value == (answer == "3") for value, answer in zip(got, answers, strict=True))


def test_answers_are_the_same_as_the_verifier_sees_it(column):
    batch = make_batch([0.0] * 3, answers=["1/2", "0.5", "3"])
    same = RewardContext(Config(), [], lambda task, a, b: {a, b} == {"1/2", "0.5"})
    terms = bind(build_terms(["majority_vote"]), same)
    close(score(batch, terms).column("reward"), [1, 1, 0])


def test_the_partners_vote_is_the_label(column, nan):
    tasks = {g: Task(id=g, prompt="?", info={"partner": p}) for g, p in (("a", "b"), ("b", "a"))}
    batch = make_batch(
        [0.0] * 6, groups=["a", "a", "a", "b", "b", "b"], answers=["1", "2", "2", "1", "1", "2"], tasks=tasks
    )
    close(column(batch, {"name": "majority_vote", "of": "partner"}), [1, 0, 0, 0, 0, 1])
    alone = bind(
        build_terms([{"name": "majority_vote", "of": "partner"}]), RewardContext(Config(), list(tasks.values()))
    )
    close(score(batch.select([0, 1, 2]), alone).column("reward"), [nan] * 3)
    tasks["b"] = Task(id="b", prompt="?", info={"partner": "c"})
    with pytest.raises(ConfigError, match=r"needs info\.partner.*task 'a' has|task 'b' has"):
        column(make_batch([0.0] * 2, groups=["a", "b"], tasks=tasks), {"name": "majority_vote", "of": "partner"})


def test_one_does_not_vote(column):
    with pytest.raises(ConfigError, match=r"majority_vote makes a label.*group_size is 1"):
        column(make_batch([0.0], answers=["1"]), "majority_vote", config={"rollout": {"group_size": 1}})


# form

WHOLE = "<think>well</think><answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "soft", "hard"),
    [
        (WHOLE, 1, 1),
        (" <think>a b</think>\n<answer>4</answer> ", 1, 1),
        ("", 0, 0),
        ("<think>well</think> 4", 0.5, 0),
        ("<answer>4</answer><think>well</think>", 0.5, 0),  # the tags of the answer stand before their place
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.5, 0),
        (WHOLE + "more", 1, 0),
        ("</answer></answer>", 0, 0),
    ],
)
def test_the_form_of_a_response(column, text, soft, hard):
    batch = make_batch([1.0], texts=[text])
    close(column(batch, {"name": "format", "strictness": "soft"}), [soft])
    close(column(batch, "format"), [hard])
    close(column(batch, {"name": "format", "strictness": "off"}), [1])


def test_a_form_that_the_prompt_began(column):
    batch = make_batch([1.0], texts=["well</think><answer>4</answer>"])
    for strictness in ("soft", "hard"):
        close(column(batch, {"name": "format", "prompt_wrote": "<think>", "strictness": strictness}), [1])


@pytest.mark.parametrize(
    ("text", "skips"),
    [
        ("</think>4", 1),
        ("<think> \n</think>4", 1),
        ("<think>hm</think>4", 0),
        ("4", 0),
        ("", 0),
        ("hm</think></think>", 0),
    ],
)
def test_thinking_given_away(column, text, skips):
    close(column(make_batch([1.0], texts=[text]), "no_thinking"), [skips])


def test_the_overlap_of_rankings(column, nan):
    """Given b, a, c and p 1/2: depths weigh 1, 1/2, 1/4 of 7/4."""
    task = {"g": Task(id="g", prompt="?", answer={"a": 1, "b": 2, "c": 0}, info={})}
    answers = ["[b] > [a] > [c]", "a, b, c", "c", None, "b b a"]
    batch = make_batch([0.5] * 5 + [None], answers=[*answers, None], groups=["g"] * 6, tasks=task)
    expected = [1, (0 + 1 / 2 + 1 / 4) / 1.75, (1 / 4) * (1 / 3) / 1.75, 0, (1 + 1 / 2 + 1 / 4 * 2 / 3) / 1.75, nan]
    close(column(batch, {"name": "rank_overlap", "p": 0.5}), expected)
    given = {"g": Task(id="g", prompt="?", info={"order": ["c", "a"]})}
    close(
        column(make_batch([0.5], answers=["c"], tasks=given), {"name": "rank_overlap", "p": 0.5, "given": "order"}),
        [5 / 6],
    )


def test_a_template_without_tags_has_no_soft_form():
    with pytest.raises(ConfigError, match="has none"):
        build_terms([{"name": "format", "template": "So {answer}.", "strictness": "soft"}])


def test_a_closed_gate_of_no_form_is_the_verdict(column, nan):
    batch = make_batch([1.0, 0.0, None], texts=["no tags", WHOLE, WHOLE])
    off = {"name": "gate", "by": {"name": "format", "strictness": "off"}}
    close(column(batch, off), [1, 0, nan])
    close(column(batch, {"name": "gate", "by": "format"}), [0, 0, nan])


# certainty


def with_statistics(**statistics):
    """One response of 3 tokens after a prompt of 2, with these token columns, and one without a token."""
    batch = Batch([make_rollout("g", 0, 3), make_rollout("g", 1, 0)])
    for name, values in statistics.items():
        batch.token_columns[f"{name}/current"] = [np.float32([np.nan, np.nan, *values]), np.float32([np.nan, np.nan])]
    return batch


def test_self_certainty_is_the_divergence_of_the_uniform_distribution(column, nan):
    """For logits (2, 0, 1): mean log-prob under the softmax, with the sign turned, is KL(U || p) + log 3."""
    logits = np.asarray([2.0, 0.0, 1.0])
    logp = logits - math.log(sum(math.exp(x) for x in logits))
    kl = sum(1 / 3 * (math.log(1 / 3) - p) for p in logp)
    total = math.log(sum(math.exp(x) for x in logits))
    batch = with_statistics(logsumexp=[total] * 3, mean_logit=[1.0] * 3)
    close(column(batch, "self_certainty"), [kl + math.log(3), nan])


def test_entropies(column, nan):
    batch = with_statistics(entropy=[0.2, 0.4, 0.9])
    close(column(batch, {"name": "entropy", "weight": -2}), [-1.0, nan])
    batch.rollouts[0].text = "a</think>b"
    batch.rollouts[0].char_ends = np.asarray([-1, -1, 1, 9, 10])
    phases = {"name": "phase_entropy", "alpha": 0.1}
    # The closing token is in neither phase.
    close(column(batch, phases), [-(0.2 - 0.09), 0])
    close(column(batch, {"name": "phase_entropy", "alpha": 5}), [0, 0])
    batch.rollouts[0].text = "no marker!"
    close(column(batch, phases), [-0.5, 0])
