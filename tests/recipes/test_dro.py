"""DRO: the reference's log-prob after the reasoning, each token weighted by its deviation over the group (in part).

Formulas and numbers are those of arXiv 2506.13351, version 1: section 4.1.3 (weights), 5.1 (KL, loss, truncated
responses). The value of a response without an answer tag and the filter's numbers are chosen here.
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hand_written_steps import (
    Response,
    clipped_gradient,
    k3_gradient,
    moved_policy,
    of_the_group,
    open_step,
    plan_of,
)

from rlvr.config import ModelConfig, ScratchConfig
from rlvr.policy import load_policy
from rlvr.records import Task
from rlvr.stages.grpo import scoring

WITHOUT = -20.0
LONGEST = 8000
TABLE = {
    # the last token of the reasoning -> log-probs of the three tokens of the reference
    "a": [-1.0, -0.5, -2.0],
    "b": [-1.0, -4.5, -2.5],
    "c": [-1.0, -1.5, -2.25],
    "d": [-1.0, -3.0, -2.0],
}


@pytest.fixture(scope="module")
def policy():
    """It lends the tokenizer."""
    sizes = {"hidden_size": 8, "heads": 1, "kv_heads": 1, "layers": 1, "intermediate_size": 8}
    scratch = ScratchConfig(**sizes, words=["<answer>"], alphabet="abcdefgh123 ")
    return load_policy(ModelConfig(scratch=scratch, device="cpu"), 0)


@pytest.fixture
def step(policy, monkeypatch):
    """`step(tasks, table)`: the recipe's step, with the log-probs of a table."""

    def opened(tasks, table):
        by_id = {policy.tokenizer.encode(letter, add_special_tokens=False)[0]: row for letter, row in table.items()}

        def logprobs(policy, asked, config):
            (opening,) = policy.tokenizer.encode("<answer>", add_special_tokens=False)
            assert all(context[-1] == opening for context, _ in asked)
            return [np.asarray(by_id[context[-2]][: len(target)]) for context, target in asked]

        monkeypatch.setattr(scoring, "continuation_logprobs", logprobs)
        return open_step(policy, plan_of("dro"), tasks)

    return opened


def response(policy, text, truncated=False):
    return Response(text, tuple(policy.tokenizer.encode(text, add_special_tokens=False)), truncated)


def reactive(rows):
    """The mean of the log-probs of each row, weighted by the deviation of each token over the rows."""
    weights = [statistics.pstdev(column) for column in zip(*rows, strict=True)]
    return [sum(w * x for w, x in zip(weights, row, strict=True)) / sum(weights) for row in rows]


TASK = Task(id="t", prompt="Revise it.", answer="12 ")
# The policy's own answer and what stands before the last token of the reasoning do not matter.
TEN = ["a<answer>12 ", "bb<answer>3", "c<answer>", "abc 1d<answer>12 ", "a", "<answ 12", "", "b<answer>3<answer>a"]


def test_ten_responses(step, policy):
    """The first token, which all reasonings make equally likely, counts for nothing; the second for most."""
    texts = [*TEN, "12 a<answer>", "d<answer>22"]
    batch = step([TASK], TABLE).score([[response(policy, text) for text in texts]])
    letters = ["a", "b", "c", "d", None, None, None, "b", "a", "d"]
    values = iter(reactive([TABLE[letter] for letter in letters if letter is not None]))
    expected = [WITHOUT if letter is None else next(values) for letter in letters]
    np.testing.assert_allclose(batch.column("reward"), expected, rtol=1e-9)


def test_a_token_that_reacts_to_the_reasoning_decides(step, policy):
    """The mean log-prob would prefer the first reasoning; its other tokens are as likely after any."""
    table = {"a": [-0.1, -0.1, -3.0], "b": [-2.0, -0.1, -0.1], "c": [-0.1, -0.1, -0.1], "d": [-0.1, -0.1, -9.0]}
    batch = step([TASK], table).score([[response(policy, f"{letter}<answer>") for letter in "abcd"]])
    reward = batch.column("reward")
    np.testing.assert_allclose(reward, reactive(list(table.values())), rtol=1e-9)
    # Weights 0.82 and 3.65: a miss of the third token costs more than four times one of the first.
    assert reward[0] < reward[1]


def test_gradient(step, policy):
    """GRPO's advantages with the deviation, sums over tokens divided by the longest response (Dr. GRPO's loss), clip
    0.2 on both sides, KL 0.001; a truncated response counts in the baseline and does not train."""
    size = len(policy.tokenizer)
    # The tokens that have moved are the letters.
    (first,) = policy.tokenizer.encode("a", add_special_tokens=False)
    logits, old = (np.roll(values, first - 1).tolist() for values in moved_policy(size))
    reference = np.linspace(0, 1, size).tolist()
    opened = step([TASK], TABLE)
    group = [response(policy, text, number == 5) for number, text in enumerate(TEN[:6])]
    # Each letter once more with a high and with a low reward.
    group += [response(policy, text) for text in ("a<answer>abcdefgh", "abcdefgh")]
    batch = opened.score([group])
    rewards = batch.column("reward").tolist()
    trained = [number for number in range(len(group)) if number != 5]
    advantages = of_the_group(rewards)
    assert max(advantages) > 0 > min(advantages)
    ids = [group[number].ids for number in trained]
    chosen = [advantages[number] for number in trained]
    expected = clipped_gradient(chosen, ids, logits, old, "constant", longest=LONGEST)
    expected += 0.001 * k3_gradient(ids, logits, reference, "constant", LONGEST)
    got = opened.gradient(batch, logits, old=old, reference=reference)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-15)


def test_groups_with_half_of_the_usual_spread_are_left_out(step, policy):
    """Spreads of 1 and 0.5 make an average of 0.75, of which half is 0.375."""
    table = {"a": [-1.0], "b": [-3.0], "c": [-2.0], "d": [-1.8], "e": [-1.7]}
    tasks = [Task(id=f"t{i}", prompt="?", answer="1") for i in range(2)]
    opened = step(tasks, table)

    def kept(*pairs):
        batch = opened.score([[response(policy, f"{letter}<answer>") for letter in pair] for pair in pairs])
        return {rollout.task.id for rollout in batch.rollouts}

    assert kept("ab", "ac") == {"t0", "t1"}
    opened.stage.observe({})
    # Spreads of 0.4 and 0.35.
    assert kept("ad", "ae") == {"t0"}
