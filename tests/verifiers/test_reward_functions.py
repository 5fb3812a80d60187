"""Verifiers as TRL's and verl's reward functions, called as these libraries call them (neither is installed here)."""

import asyncio
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy
import pytest

from rlvr import Verdict, Verifier
from rlvr.errors import ConfigError
from rlvr.records import Task, VerdictStatus
from rlvr.rewards.per_completion import PerCompletion
from rlvr.verifiers import MathVerifier, Needs
from rlvr.verifiers.base import as_verifier, judged
from rlvr.verifiers.reward_functions import TrlReward, VerlBatchScore, trl_reward, verl_batch_score, verl_score


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
    output = [[{"role": "assistant", "content": r"\boxed{42}"}]]
    assert reward(prompts=chat, completions=output, completion_ids=[[1]], answer=["42"]) == [1.0]
    assert trl_reward("math", answer="solution")(prompts=["?"], completions=["#### 7"], solution=["so\n#### 7"]) == [
        1.0
    ]
    assert trl_reward(Unsure())(prompts=["?"], completions=["7"], answer=["7"]) == [None]
    assert trl_reward(Broken())(prompts=["?"], completions=["7"], answer=["7"]) == [None]
    assert reward(prompts=["?"], completions=["7"], answer=[None]) == [None]  # no reference: undecided, not wrong
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


def test_threads_share_one_pool(monkeypatch):
    made = []

    class Pool:
        def __init__(self):
            time.sleep(0.05)  # long enough for the other threads to arrive
            made.append(self)

        def verify_many(self, verifier, pairs):
            return [Verdict(VerdictStatus.CORRECT, 1.0) for _ in pairs]

    monkeypatch.setattr("rlvr.verifiers.pool.VerifierPool", Pool)
    monkeypatch.setattr("rlvr.verifiers.reward_functions._pools", {})
    score = verl_score(lambda completion, answer: completion == answer)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: score("", "42", "42"), range(8))) == [1.0] * 8
    assert len(made) == 1


def longer(completion, answer):
    return len(completion) > len(answer)


class WhereItRuns(Verifier):
    needs = Needs(process=True)

    def verify(self, task, completion):
        return Verdict.from_score(os.getpid() != int(completion))


def score_pickled(pickled):
    """What a process does that a library starts: load the function, and call it as TRL or verl does."""
    function = pickle.loads(pickled)
    if isinstance(function, TrlReward):
        return function(prompts=["?"] * 2, completions=["12", r"\boxed{2x+1}"], answer=["1", "1 + 2x"])
    if isinstance(function, VerlBatchScore):
        return function(data_sources=["s"], solution_strs=["12"], ground_truths=["1"], extra_infos=[{}])
    return function("s", "12", "1", {})  # by position, as PrimeRewardManager calls


@pytest.mark.alone
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_adapters_that_run_in_a_pool_are_pickled_and_each_process_starts_its_own(method):
    functions = [trl_reward(longer), verl_score(longer), verl_batch_score(longer), trl_reward("math")]
    assert verl_score(longer)("s", "12", "1") == 1.0  # a fork must not use the pool that this process now has
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as executor:
        results = [executor.submit(score_pickled, pickle.dumps(function)) for function in functions]
        assert [future.result(timeout=60) for future in results] == [[1.0, 1.0], 1.0, [1.0], [0.0, 1.0]]


def test_a_verifier_that_asks_for_a_process_does_not_run_in_the_caller():
    assert verl_score(WhereItRuns())("s", str(os.getpid()), "1") == 1.0
    assert trl_reward(WhereItRuns())(prompts=["?"], completions=[str(os.getpid())]) == [1.0]


@pytest.mark.parametrize("extra", [None, "x", "", {}, numpy.array(3), numpy.array({"index": 3}, dtype=object), []])
def test_extra_info_may_be_anything(extra):
    assert verl_score("exact")("s", "7", "7", extra) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "7", ["7"], ("7",), {"role": "assistant", "content": "7"}, [{"role": "assistant", "content": "7"}],
        [{"role": "tool", "content": "6"}, {"role": "assistant", "content": "7"}], numpy.str_("7"),
        [{"role": "assistant", "content": [{"type": "text", "text": "7"}]}],
    ],
)  # fmt: skip
def test_the_forms_of_a_completion(completion):
    assert trl_reward("exact")(prompts=["?"], completions=[completion], answer=["7"]) == [1.0]


@pytest.mark.parametrize(
    "answer",
    [
        "7", 7, 7.0, numpy.int64(7), numpy.float32(7), numpy.str_("7"), numpy.array("7", dtype=object), ("7", "8"),
        numpy.array(["7", "8"], dtype=object), numpy.array([8, 7]), [numpy.int64(7)], numpy.array(7),
    ],
)  # fmt: skip
def test_the_forms_of_a_reference_answer(answer):
    assert trl_reward("math")(prompts=["?"], completions=[r"\boxed{7}"], answer=[answer]) == [1.0]
    assert verl_score("math")("s", r"\boxed{7}", answer) == 1.0
    batch = verl_batch_score("math")
    sources = numpy.array(["s", "s"], dtype=object)
    assert batch(data_sources=sources, solution_strs=["7", r"\boxed{7}"], ground_truths=[answer] * 2)[1] == 1.0


def test_columns_may_be_arrays():
    options = numpy.array([["4", "7"], ["4", "7"]])
    answers = numpy.array(["B", "A"])
    reward = trl_reward("choice")
    assert reward(prompts=["?"] * 2, completions=["B", "B"], answer=answers, options=options) == [1.0, 0.0]
    info = {"options": numpy.array(["4", "7"]), "question": numpy.array([{"role": "user", "content": "?"}])}
    assert verl_score("choice")("s", "B", "B", info) == 1.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: trl_reward("math")(prompts=["?"], completions=["7"], solution=["7"]),
            "the column 'answer' is missing",
        ),
        (lambda: trl_reward("math")(prompts=["?"], completions=["7"], solution=["7"]), "are: 'solution'"),
        (lambda: trl_reward("math")(prompts=["?"], completions=["7"], answer="7"), "'answer' is str, not a list of 1"),
        (lambda: trl_reward("math")(prompts=["?"], completions=["7"], answer=[{7}]), "'answer' holds set"),
        (lambda: trl_reward("math")(prompts=["?"], completions=[7], answer=["7"]), "'completions' holds int"),
        (lambda: trl_reward("math")(prompts=["?"], completions=[["7", "8"]], answer=["7"]), "holds list of str"),
        (lambda: trl_reward("math")(prompts=["?"], completions=[{"text": "7"}], answer=["7"]), "holds dict"),
        (lambda: verl_score("math")("s", "7", None), "ground_truth (reward_model.ground_truth in the data) is missing"),
        (lambda: verl_score("math")("s", "7", object()), "ground_truth (reward_model.ground_truth in the data) holds"),
        (lambda: verl_score("math")("s", b"7", "7"), "solution_str holds bytes"),
    ],
)
def test_what_cannot_be_read_is_one_error_at_the_first_call(call, says):
    with pytest.raises(ConfigError) as raised:
        call()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_cannot_be_read_later_is_undecided():
    reward, score = trl_reward("math"), verl_score("math")
    assert reward(prompts=["?"], completions=[r"\boxed{7}"], answer=["7"]) == [1.0]
    later = {"prompts": ["?"] * 3, "completions": [7, "7", r"\boxed{7}"], "answer": ["7", {7}, "7"]}
    assert reward(**later) == [None, None, 1.0]
    assert score("s", r"\boxed{7}", "7") == 1.0
    assert score("s", b"7", "7") == score("s", "7", object()) == 0.0
    assert trl_reward("format")(prompts=["?"], completions=["<think>a</think><answer>b</answer>"]) == [1.0]


def test_math_is_imported_alone():
    code = (
        "import json, sys; from rlvr.verifiers import MathVerifier; MathVerifier().quick; "
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout)
    heavy = {"torch", "transformers", "sympy", "mpmath", "math_verify", "pydantic", "asyncio", "datasets", "regex"}
    assert not heavy & set(modules)
    assert len(modules) < 300  # 276, of which most are numpy's and the standard library's
    # Of the library: the package of the verifier, and by name what it stands on.
    others = {name for name in modules if name.startswith("rlvr.") and not name.startswith("rlvr.verifiers.math.")}
    assert others == {
        "rlvr.core",
        "rlvr.core.calling",
        "rlvr.core.component",
        "rlvr.core.extras",
        "rlvr.core.specs",
        "rlvr.errors",
        "rlvr.records",
        "rlvr.registry",
        "rlvr.verifiers",
        "rlvr.verifiers.answers",
        "rlvr.verifiers.base",
        "rlvr.verifiers.math",
        "rlvr.verifiers.math_in_text",
    }


@pytest.mark.parametrize("name", ["MathVerifier", "VerifierPool", "CodeVerifier", "judged"])
def test_names_are_imported_on_first_use(name):
    import rlvr.verifiers

    assert name in dir(rlvr.verifiers)
    assert getattr(rlvr.verifiers, name).__name__ == name
    with pytest.raises(AttributeError, match="MathVerifyer"):
        rlvr.verifiers.MathVerifyer  # noqa: B018


def test_a_compute_score_of_verl_is_a_verifier_and_a_reward():
    """It is called with verl's four keywords, and may return a dict with `score`."""
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "acc": True}

    def plain(data_source, solution_str, ground_truth, extra_info, **kwargs):
        return 0.5

    task = Task("t", "6 x 7?", "42", info={"index": 3}, source="openai/gsm8k")
    verifier = as_verifier(compute_score)
    assert verifier.check_task(task) is None
    assert asyncio.run(judged(verifier, task, "42")).score == 1.0
    assert asyncio.run(judged(verifier, task, "41")).status == VerdictStatus.WRONG
    assert seen == [("openai/gsm8k", output, "42", {"index": 3}) for output in ("42", "41")]
    assert asyncio.run(judged(as_verifier(plain), task, "41")).score == 0.5
    term = PerCompletion(compute_score, "compute_score")
    assert term.missing(task) is None
    assert term.call(task, "42") == {"score": 1.0, "acc": True}
    from rlvr.testing import make_batch  # imports torch, which the processes that read this file do not need

    batch = make_batch([[0.0]])
    batch.rollouts[0].task = task
    batch.rollouts[0].text = "42"
    assert term(batch).tolist() == [1.0]


def test_a_bad_schema_is_not_called_a_missing_answer():
    score = verl_score("json_schema")
    with pytest.raises(ConfigError, match=r"JsonSchemaVerifier cannot use the data: not a JSON schema") as raised:
        score(data_source="d", solution_str="{}", ground_truth=None, extra_info={"schema": {"type": "nonsense"}})
    assert "missing" not in str(raised.value)
