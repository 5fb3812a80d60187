"""judge: what it pays, how votes are counted, what stays undecided and why, and what is refused before training."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from rlvr.errors import ConfigError, DataError
from rlvr.records import Task
from rlvr.testing import StubJudge
from rlvr.verifiers import VerifierPool, as_verifier
from rlvr.verifiers.pool import Verification

TASK = Task("1", "What is 2 + 2?", "4", info={"style": "brief"})


def judge(stub, **options):
    return as_verifier({"name": "judge", "urls": stub.url, "model": "stub", "hedge": None, **options})


def verdict(stub, completion="4", task=TASK, **options):
    return asyncio.run(judge(stub, **options).verify(task, completion))


def right(request):
    return request.verdict("yes" if "4" in request.fenced["response"] else "no")


def test_a_label_pays_its_score():
    with StubJudge(right) as stub:
        assert verdict(stub, "it is 4").score == 1
        wrong = verdict(stub, "it is 5")
    assert (wrong.score, wrong.status, wrong.answer) == (0, "wrong", "no")
    body = stub.requests[0].body
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("stub", 0.0, 1024)
    assert stub.requests[0].fenced == {"prompt": "What is 2 + 2?", "answer": "4", "response": "it is 4"}
    assert stub.requests[0].code != stub.requests[1].code


@pytest.mark.parametrize(
    ("options", "reply", "score"),
    [
        ({"labels": {"good": 1, "fair": 0.4, "bad": -1}}, "fair", 0.4),
        ({"labels": {"good": 1, "fair": 0.4, "bad": -1}}, "**BAD**.", -1),
        ({"labels": {"good": 1, "bad": 0}}, "goodish", "unparsable"),
        ({"read": "number"}, "7", 0.7),
        ({"read": "number", "low": 1, "high": 5}, "Score 4/5", 0.75),
        ({"read": "number"}, "between 6 and 7", "unparsable"),
        ({"read": "number"}, "11", "out_of_range"),
        ({"read": "number"}, "-1", "out_of_range"),
        ({"read": "number"}, "nan", "unparsable"),
        ({}, "", "unparsable"),
        ({}, "yes or no", "unparsable"),
    ],
)
@pytest.mark.parametrize("coded", [True, False])
def test_what_a_reply_says(options, reply, score, coded):
    with StubJudge(lambda request: request.verdict(reply) if coded else f"I have read it.\n{reply}") as stub:
        given = verdict(stub, coded=coded, **options)
    if isinstance(score, str):
        assert (given.score, given.status) == (None, "error") and given.reason.startswith(score), given.reason
    else:
        assert given.score == pytest.approx(score)


def test_a_verdict_without_the_code_or_two_that_differ_are_none():
    replies = [
        lambda request: "Verdict: yes",
        lambda request: f"Verdict {'0' * 16}: yes",
        lambda request: request.verdict("yes") + f"\nVerdict {request.code}: no",
        lambda request: "the answer is yes",
    ]
    for reply in replies:
        with StubJudge(reply) as stub:
            assert verdict(stub).score is None
    with StubJudge(lambda request: request.verdict("yes") + f"\nVerdict {request.code}: Yes\n") as stub:
        assert verdict(stub).score is None  # two spellings
        stub.answer = lambda request: request.verdict("yes") + f"\n{request.verdict('yes')}"
        assert verdict(stub).score == 1


JSON = [
    ('{{"score": 5, "code": "{code}"}}', {}, 0.5),
    ('first {{"score": 1}} then {{"score": 10, "code": "{code}"}}', {}, 1.0),
    ('{{"ok": true, "code": "{code}"}}', {"json_field": "ok"}, 1.0),
    ('{{"ok": "No", "code": "{code}"}}', {"json_field": "ok"}, 0.0),
    ('{{"ok": "perhaps", "code": "{code}"}}', {"json_field": "ok"}, None),
    ('{{"score": 11, "code": "{code}"}}', {}, None),
    ('{{"score": 5}}', {}, None),
    ('{{"score": NaN, "code": "{code}"}}', {}, None),
    ('{{"score": 1, "code": "{code}"}} {{"score": 2, "code": "{code}"}}', {}, None),
    ("{{" * 5000, {}, None),
]


@pytest.mark.parametrize(("text", "options", "score"), JSON)
def test_a_field_of_an_object(text, options, score):
    with StubJudge(lambda request: text.format(code=request.code)) as stub:
        given = verdict(stub, read="json", **options)
    assert given.score == score, given.reason


def test_a_schema_is_asked_for_and_kept_to():
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}, "additionalProperties": False}
    with StubJudge(lambda request: f'{{"score": 5, "code": "{request.code}"}}') as stub:
        assert verdict(stub, read="json", schema=schema).score == 0.5
        asked = stub.requests[0].body["response_format"]["json_schema"]["schema"]
        assert set(asked["properties"]) == {"code", "score"} and asked["required"] == ["code"]
        stub.answer = lambda request: f'{{"score": 5.5, "code": "{request.code}"}}'
        assert "does not fit the schema" in verdict(stub, read="json", schema=schema).reason
        with pytest.raises(ConfigError, match="no property 'mark'"):
            judge(stub, read="json", schema=schema, json_field="mark")


def test_the_probability_of_a_token():
    def tokens(**probabilities):
        top = [{"token": token, "logprob": math.log(p)} for token, p in probabilities.items()]
        return {"message": {"content": "x"}, "logprobs": {"content": [{"token": "x", "top_logprobs": top}]}}

    words = {"read": "probability", "coded": False}
    with StubJudge(tokens(yes=0.5, Yes=0.1, no=0.2, maybe=0.1)) as stub:
        # By hand: (0.5 + 0.1) / (0.5 + 0.1 + 0.2).
        assert verdict(stub, **words).score == pytest.approx(0.75)
        assert stub.requests[0].body["max_tokens"] == 1 and stub.requests[0].body["logprobs"] is True
        stub.answer = tokens(yes=0.2, no=0.2, maybe=0.6)
        assert verdict(stub, **words).score is None
        assert verdict(stub, **words, least_mass=0.3).score == pytest.approx(0.5)
        stub.answer = "yes"
        assert "no log-probs" in verdict(stub, **words).reason


def test_the_probability_of_a_letter_that_stands_for_a_label(tmp_path):
    """By default the labels are letters, others in each request, and the words themselves are no verdict."""
    drawn = set()

    def answer(request):
        letters = request.letters
        drawn.add((letters["yes"], letters["no"]))
        assert not {"A", "I", "Y", "N"} & set(letters.values())
        return request.probabilities({"yes": 0.6, "no": 0.2, "other": 0.1})

    with StubJudge(answer) as stub:
        scores = [verdict(stub, read="probability").score for _ in range(20)]
        assert scores == pytest.approx([0.75] * 20) and len(drawn) > 10
        kept = {"read": "probability", "cache": str(tmp_path)}
        assert [verdict(stub, **kept).score for _ in range(2)] == pytest.approx([0.75, 0.75])
        assert len(stub.requests) == 21  # the second one is from the cache, whose letters are those of its request
        stub.answer = lambda request: request.probabilities({"Yes": 0.9, "No": 0.05})
        assert "labels have 0.000" in verdict(stub, read="probability").reason
        with pytest.raises(ConfigError, match=r"13 labels are too many.*coded to false"):
            judge(stub, read="probability", labels={str(n): n for n in range(13)})


@pytest.mark.parametrize(
    ("rule", "votes", "score"),
    [
        ("majority", "yyn", 1),
        ("majority", "ynn", 0),
        ("majority", "yn", 0),
        ("majority", "yy?", 1),
        ("majority", "yn?", None),
        ("majority", "y??", None),
        ("any", "nny", 1),
        ("any", "nnn", 0),
        ("any", "n?", None),
        ("any", "y??", 1),
        ("all", "yyy", 1),
        ("all", "y?", None),
        ("all", "n?", 0),
        ("mean", "yyn", 2 / 3),
        ("mean", "yn?", 0.5),
        ("mean", "y??", None),
        ("majority", "???", None),
    ],
)
def test_votes(rule, votes, score):
    words = {"y": "yes", "n": "no", "?": "hm"}
    number = iter(votes)
    lock = threading.Lock()

    def answer(request):
        with lock:
            return request.verdict(words[next(number)])

    with StubJudge(answer) as stub:
        given = verdict(stub, votes=len(votes), rule=rule)
        assert all(request.body["temperature"] == 1.0 for request in stub.requests)
    assert given.score == (None if score is None else pytest.approx(score))


def test_what_cannot_be_known_before_training_is_undecided_and_counted():
    with StubJudge(fail=1.0) as stub:
        verifier = judge(stub, retries=0)
        for _ in range(4):
            assert asyncio.run(verifier.verify(TASK, "4")).score is None
        counts = verifier.metrics()
    assert (counts["requests"], counts["failed"]) == (4, 4)
    assert (counts["undecided"], counts["undecided/unreachable"]) == (4, 4)
    down = asyncio.run(verifier.verify(TASK, "4"))  # nobody listens now
    assert (down.score, down.status, down.traceback) == (None, "error", "")
    assert verifier.metrics()["undecided/unreachable"] == 1
    with StubJudge({"message": {"content": None, "refusal": "I will not"}}) as stub:
        verifier = judge(stub)
        refused = asyncio.run(verifier.verify(TASK, "4"))
        assert refused.score is None and "I will not" in refused.reason
        assert verifier.metrics()["undecided/refused"] == 1
        assert verifier.metrics()["undecided"] == 0  # since the last call
    with StubJudge(hang=1.0) as stub:
        verifier = judge(stub, deadline=0.2)
        late = asyncio.run(verifier.verify(TASK, "4"))
        assert (late.score, late.status) == (None, "timeout")
        assert verifier.metrics()["undecided/deadline"] == 1


def test_a_judge_that_answers_nothing_or_another_language():
    for text in ("", "Да, это верно", "はい"):
        with StubJudge(text) as stub:
            assert verdict(stub).reason.startswith("unparsable")
            assert verdict(stub, coded=False).reason.startswith("unparsable")


def test_what_is_refused_before_training(monkeypatch):
    good = {"name": "judge", "urls": "http://127.0.0.1:1/v1", "model": "m"}
    for options, message in (
        ({"urls": ()}, "needs `urls`"),
        ({"model": ""}, "a `model`"),
        ({"urls": "localhost:8000"}, "no url"),
        ({"template": "Is {prompt} good?"}, r"no \{response\}"),
        ({"labels": {"yes": 1}}, "at least two"),
        ({"read": "number", "low": 3, "high": 3}, "not below"),
        ({"read": "probability", "votes": 3}, "the same for every vote"),
        ({"request": {"n": 4}}, "sets 'n'"),
        ({"hedge": 0.5}, "1 or more"),
        ({"reed": "label"}, "no option 'reed'"),
    ):
        with pytest.raises(ConfigError, match=message):
            as_verifier({**good, **options})
    with VerifierPool() as pool:
        monkeypatch.delenv("A_KEY_OF_A_TEST", raising=False)
        with pytest.raises(ConfigError, match="the environment variable A_KEY_OF_A_TEST"):
            Verification({**good, "key": "A_KEY_OF_A_TEST"}, pool).check([TASK])
        with pytest.raises(DataError, match=r"has \{tone\}, and the task's info has no 'tone'"):
            Verification({**good, "template": "{response} in the tone {tone}"}, pool).check([TASK])
        with pytest.raises(DataError, match="has no answer"):
            Verification(good, pool).check([Task("2", "?")])
        Verification({**good, "template": '{response}, {style}; {"json": 1} {}'}, pool).check(
            [Task("2", "?", info=TASK.info)]
        )


def test_the_key_comes_from_the_environment_and_is_in_no_request_body(monkeypatch):
    monkeypatch.setenv("A_KEY_OF_A_TEST", "s3cret")
    with StubJudge(right) as stub:
        assert verdict(stub, key="A_KEY_OF_A_TEST").score == 1
    assert stub.requests[0].key == "s3cret" and "s3cret" not in str(stub.requests[0].body)


def test_the_cache_is_by_the_whole_request_and_the_vote(tmp_path):
    with StubJudge(right) as stub:
        options = {"cache": str(tmp_path / "cache"), "votes": 3}
        assert verdict(stub, "4", **options).score == 1
        assert len(stub.requests) == 3
        again = judge(stub, **options)
        assert asyncio.run(again.verify(TASK, "4")).score == 1
        assert len(stub.requests) == 3 and again.metrics()["cached"] == 3
        for more in ({"votes": 4}, {"temperature": 0.5}, {"template": "{response}?"}, {"system": "Be strict."}):
            before = len(stub.requests)
            verdict(stub, "4", **{**options, **more})
            assert len(stub.requests) - before == (1 if "votes" in more else 3), more
        before = len(stub.requests)
        verdict(stub, "5", **options)
        assert len(stub.requests) == before + 3
        for file in (tmp_path / "cache").rglob("*.json"):
            file.write_text("{")
        assert verdict(stub, "4", **options).score == 1  # asked again
        assert len(stub.requests) == before + 6


def test_what_was_not_read_is_not_kept(tmp_path):
    with StubJudge("hm") as stub:
        assert verdict(stub, cache=str(tmp_path)).score is None
        stub.answer = right
        assert verdict(stub, cache=str(tmp_path)).score == 1


def test_in_the_pool_a_judge_leaves_nothing_behind():
    before = {thread.ident for thread in threading.enumerate()}
    with StubJudge(right, delay=0.05) as stub:
        verifier = judge(stub)
        with VerifierPool() as pool:
            verdicts = pool.verify_many(verifier, [(TASK, text) for text in ("4", "5") * 20])
        assert [one.score for one in verdicts] == [1, 0] * 20
        assert stub.most_at_once > 8
        assert not verifier.client._loops
    left = [t.name for t in threading.enumerate() if t.ident not in before and not t.name.startswith("Thread-")]
    assert not left


def test_a_judge_trains_with_its_counts_among_the_metrics(make_trainer):
    with StubJudge(lambda request: request.verdict("yes" if len(request.fenced["response"]) % 2 else "no")) as stub:
        written = {"name": "judge", "urls": stub.url, "model": "stub", "hedge": None, "price": [1.0, 2.0]}
        over = {"verifier": "exact", "verifiers": {"judge": written}}
        trainer = make_trainer({**over, "rewards": [{"name": "verdict", "verifier": "judge"}]})
        rows = trainer.train(2)
    odd = [float(len(rollout.text) % 2) for rollout in trainer.batch.rollouts]
    assert trainer.batch.columns["reward"].tolist() == odd
    assert [row["verifier/judge/requests"] for row in rows] == [8, 8]
    assert all(row["verifier/judge/seconds"] > 0 and row["verifier/judge/cost"] > 0 for row in rows)


@pytest.mark.parametrize("tag", ["think", "reasoning"])
def test_a_verdict_that_is_tried_while_thinking_is_none(tag):
    def label(request):
        return f"<{tag}>Perhaps\n{request.verdict('no')}\nor not.</{tag}>\n{request.verdict('yes')}"

    def number(request):
        return f'<{tag}>{{"score": 2, "code": "{request.code}"}}</{tag}> {{"score": 5, "code": "{request.code}"}}'

    with StubJudge(label) as stub:
        assert verdict(stub).score == 1
        stub.answer = number
        assert verdict(stub, read="json").score == 0.5
        # One that thinks alone has decided nothing.
        stub.answer = lambda request: f"<{tag}>{request.verdict('yes')}</{tag}>"
        assert verdict(stub).score is None


def test_a_reply_in_parts_is_their_text():
    def parts(request):
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": request.verdict("no")}]}
        return {"message": {"content": [thought, {"type": "text", "text": request.verdict("yes")}]}}

    with StubJudge(parts) as stub:
        assert verdict(stub).score == 1


def test_a_score_that_is_not_a_number_is_out_of_range():
    with StubJudge(lambda request: f'{{"score": NaN, "code": "{request.code}"}}') as stub:
        got = verdict(stub, read="json")
        assert got.score is None and got.reason.startswith("out_of_range: the judge gives nan")
