"""BR-RM: two turns of a judge, the reward of the second one's verdict, and one advantage for both.

The numbers are those of github yzjiao/BR-RM, commit 34a58b2: nemo_rl/environments/brrm_environment.py
(`_process_scoring_stage`, `parse_scoring_response`, `distance_abs`), train_brrm_multinode_8b.sh,
examples/configs/grpo_brrm.yaml, nemo_rl/algorithms/utils.py (`calculate_baseline_and_std_per_prompt`) and
nemo_rl/data/hf_datasets/reward_benchmarks.py (`LocalDataset`).
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hand_written_steps import PROBES, Response, clipped_gradient, k3_gradient, moved_policy, plan_of, softmax

from rlvr.data import load_tasks
from rlvr.records import Task

TASK = Task(id="t", prompt="Which response is better?", answer="A", info={"labels": ["A", "B"]})
RIGHT, WRONG, NO_FORM = 0.0, -10.0, -100.0
"""- 10 times the distance of the numbers; format_penalty, also where the box has no number."""
FOCUS = "<focus>Is the sum right?</focus>"
FOR_A = "<check>A has the sum right.</check>\n<verdict>\\boxed{1}</verdict>"
FOR_B = "<check>B is shorter.</check>\n<verdict>\\boxed{2}</verdict>"
# (first turn, second turn, reward): the second turn alone decides.
CONVERSATIONS = [
    (FOCUS, FOR_A, RIGHT),
    (FOCUS, FOR_B, WRONG),
    ("No tags and no criteria.", FOR_A, RIGHT),
    ("", "<verdict>\\boxed{1}</verdict>", RIGHT),
    (FOCUS, "The sum.\n<verdict> \\boxed{2} </verdict>", WRONG),
    (FOR_A, FOR_B, WRONG),
    (FOR_B, FOR_A, RIGHT),
    (FOCUS, f"{FOR_A}\nSo B is not better than A.\nB", RIGHT),
    (FOCUS, "<verdict>\\boxed{Response 1}</verdict>", RIGHT),
    (FOCUS, "<verdict>\n\\boxed{ 2 }\n</verdict>", WRONG),
    (FOCUS, "<verdict>\\boxed{3}</verdict>", WRONG),
    (FOCUS, "<verdict>\\boxed{neither}</verdict>", NO_FORM),
    (FOCUS, "<verdict>\\boxed{A}</verdict>", NO_FORM),
    (FOCUS, "<verdict>\\boxed{1, 2}</verdict>", NO_FORM),
    (FOCUS, "<check>A has the sum right.</check> \\boxed{1}", NO_FORM),
    (FOCUS, "<check>A has the sum right.</check> <verdict>1</verdict>", NO_FORM),
    (FOCUS, "A is better.", NO_FORM),
    (FOR_A, "A is better.", NO_FORM),
    (FOR_A, "", NO_FORM),
]


@pytest.fixture
def step(recipe_step):
    return recipe_step("br-rm", [TASK])


def conversations(step, texts, ids):
    """The members' two turns, of these token ids."""
    return step.sample(len(texts), lambda member, turn: Response(texts[member][turn], ids[member][turn]))


def test_rewards_of_conversations(step):
    texts = [(first, second) for first, second, _ in CONVERSATIONS]
    batch = step.batch_of(conversations(step, texts, [((1,), (2,))] * len(texts)))
    assert batch.column("reward").tolist() == [reward for _, _, reward in CONVERSATIONS]


def test_each_pair_is_shown_in_both_orders():
    """LocalDataset adds every pair of train_data.jsonl a second time, the responses and the label the other way
    round."""
    train = plan_of("br-rm").config.data.train
    pairs = [{"prompt": "User: 1+1=", "chosen": "2", "rejected": "3"}]
    tasks = load_tasks({**train, "data": pairs})
    shown = {task.answer: task.prompt[0]["content"] for task in tasks}
    assert set(shown) == {"A", "B"}
    assert "Response 1\n2\n\n# Response 2\n3" in shown["A"]
    assert "Response 1\n3\n\n# Response 2\n2" in shown["B"]


def leave_one_out(rewards):
    """Reward less the mean of the others, over their deviation; not divided where the others are equal."""
    result = []
    for number, reward in enumerate(rewards):
        others = [other for i, other in enumerate(rewards) if i != number]
        gain = reward - statistics.fmean(others)
        result.append(gain / (statistics.pstdev(others) or 1.0))
    return result


def test_a_broken_form_costs_far_more_than_a_wrong_verdict(step):
    """One of each kind: the wrong verdict has a positive advantage beside the broken form."""
    texts = [(FOCUS, FOR_A), (FOCUS, FOR_B), (FOCUS, "A is better.")]
    batch = step.batch_of(conversations(step, texts, [((1,), (2,))] * 3))
    got = batch.column("advantage")
    np.testing.assert_allclose(got, leave_one_out([RIGHT, WRONG, NO_FORM]), rtol=1e-9)
    assert got[0] > got[1] > 0 > got[2]


def test_gradient_of_both_turns(step):
    """Tokens on both sides of the clip (0.2 below, 0.28 above, no cap), in both turns; the mean over all tokens, and
    the KL of 0.001. The reply between the turns is not trained, nor do the engine's log-probs matter."""
    texts = [(FOCUS, second) for _ in PROBES for second in (FOR_A, FOR_B)]
    ids = [((1 + number,), (1 + number, 1)[:size]) for number in range(len(PROBES)) for size in (2, 1)]
    batch = step.batch_of(conversations(step, texts, ids))
    logits, old = moved_policy(12)
    reference = np.log(softmax(np.linspace(0, 1, 12))).tolist()
    whole = [first + second for first, second in ids]
    advantages = leave_one_out([RIGHT, WRONG] * len(PROBES))
    expected = clipped_gradient(advantages, whole, logits, old, "tokens", clip=(0.2, 0.28))
    expected += 0.001 * k3_gradient(whole, logits, reference, "tokens")
    for engine in (None, np.linspace(1, 0, 12).tolist()):
        got = step.gradient(batch, logits, old=old, reference=reference, engine=engine)
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
