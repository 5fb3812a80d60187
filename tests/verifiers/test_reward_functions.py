"""Verifiers as TRL's and verl's reward functions, called as these libraries call them (neither is installed here)."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlvr import Verdict, Verifier
from rlvr.records import VerdictStatus
from rlvr.verifiers import MathVerifier, Needs
from rlvr.verifiers.reward_functions import trl_reward, verl_score


class Broken(Verifier):
    def verify(self, task, completion):
        raise RuntimeError("no")


class Unsure(Verifier):
    def verify(self, task, completion):
        return Verdict.undecided("who knows")


def test_a_verifier_is_a_reward_function_of_trl():
    reward = trl_reward(MathVerifier())
    assert reward.__name__ == "MathVerifier"
    # GRPOTrainer repeats every column for each completion and adds its own arguments, which are no columns
    rewards = reward(
        prompts=["6 x 7?"] * 3,
        completions=[r"\boxed{42}", r"\boxed{41}", "no"],
        completion_ids=[[1], [2], [3]],
        answer=["42"] * 3,
        level=[1, 2, 3],
        trainer_state=object(),
        log_metric=print,
    )
    assert rewards == [1.0, 0.0, 0.0]
    chat = [[{"role": "user", "content": "6 x 7?"}]]
    said = [[{"role": "assistant", "content": r"\boxed{42}"}]]
    assert reward(prompts=chat, completions=said, completion_ids=[[1]], answer=["42"]) == [1.0]
    assert trl_reward("math", answer="solution")(prompts=["?"], completions=["#### 7"], solution=["so\n#### 7"]) == [
        1.0
    ]
    assert trl_reward(Unsure())(prompts=["?"], completions=["7"], answer=["7"]) == [None]
    assert trl_reward(Broken())(prompts=["?"], completions=["7"], answer=["7"]) == [None]
    assert reward(prompts=["?"], completions=["7"]) == [None]  # no reference: undecided, not wrong
    assert reward(
        prompts=["?"], completions=[[{"role": "assistant", "content": None, "tool_calls": []}]], answer=["7"]
    ) == [0.0]
    options = [["Oslo", "Bergen"]]
    assert trl_reward("choice")(prompts=["?"], completions=["A"], answer=["A"], options=options) == [1.0]


def test_a_verifier_is_a_compute_score_of_verl():
    compute_score = verl_score(MathVerifier())
    # NaiveRewardManager calls by keyword; others by position
    assert (
        compute_score(data_source="openai/gsm8k", solution_str="#### 72", ground_truth="72", extra_info={"index": 3})
        == 1.0
    )
    assert compute_score("openai/gsm8k", r"\boxed{71}", "72") == 0.0
    assert compute_score("s", r"\boxed{71}", "72", None, sandbox_fusion_url=None) == 0.0
    assert isinstance(compute_score("s", r"\boxed{72}", "72"), float)
    restated = {"question": r"Simplify $\sqrt{12}$."}
    assert compute_score("s", r"\boxed{\sqrt{12}}", r"2\sqrt{3}", restated) == 0.0
    assert verl_score(Unsure(), undecided=0.5)("s", "7", "7") == 0.5
    assert verl_score(Broken())("s", "7", "7") == 0.0


def test_a_plain_function_and_a_group_verifier_run_in_a_pool():
    assert verl_score(lambda completion, answer: completion == answer)("s", "7", "7") == 1.0


class WhereItRuns(Verifier):
    needs = Needs(process=True)

    def verify(self, task, completion):
        return Verdict.from_score(os.getpid() != int(completion))


def test_a_verifier_that_asks_for_a_process_does_not_run_in_the_caller():
    assert verl_score(WhereItRuns())("s", str(os.getpid()), "1") == 1.0
    assert trl_reward(WhereItRuns())(prompts=["?"], completions=[str(os.getpid())]) == [1.0]


def test_threads_share_one_pool(monkeypatch):
    made = []

    class Pool:
        def __init__(self):
            time.sleep(0.05)  # long enough for the other threads to arrive
            made.append(self)

        def verify_many(self, verifier, pairs):
            return [Verdict(VerdictStatus.CORRECT, 1.0) for _ in pairs]

    monkeypatch.setattr("rlvr.verifiers.pool.VerifierPool", Pool)
    score = verl_score(lambda completion, answer: completion == answer)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: score("", "42", "42"), range(8))) == [1.0] * 8
    assert len(made) == 1


def test_math_is_imported_alone():
    code = (
        "import sys; from rlvr.verifiers import MathVerifier; MathVerifier().quick; "
        "heavy = {'torch', 'transformers', 'sympy', 'mpmath', 'math_verify', 'pydantic', 'asyncio', 'datasets', 'regex'}; "
        "print(len(sys.modules), sorted(heavy & set(sys.modules)), sum(m.startswith('rlvr') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, heavy, ours = (
        done.stdout.strip().partition(" ")[0],
        done.stdout.split("[")[1].split("]")[0],
        done.stdout.split()[-1],
    )
    assert heavy == ""
    assert int(count) < 300  # 244 of which most are numpy's and the standard library's
    assert int(ours) < 45


@pytest.mark.parametrize("name", ["MathVerifier", "VerifierPool", "CodeVerifier", "judged"])
def test_names_are_imported_on_first_use(name):
    import rlvr.verifiers

    assert name in dir(rlvr.verifiers)
    assert getattr(rlvr.verifiers, name).__name__ == name
    with pytest.raises(AttributeError, match="MathVerifyer"):
        rlvr.verifiers.MathVerifyer  # noqa: B018
