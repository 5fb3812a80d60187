"""The verifier `scorer` at a server that speaks vLLM's API of pooling models."""

from __future__ import annotations

import asyncio

import pytest

from rlvr.config import FrozenModelConfig
from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.run.loaded_models import LoadedModels
from rlvr.verifiers import as_verifier
from rlvr.verifiers.judge import chat_client

pytest.importorskip("vllm.entrypoints.pooling")

from stub_pooling_server import StubPoolingServer

TASK = Task("1", "2 + 2?", "4")


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_BACKOFF", 0.02)


def length(path, request):
    """The characters of a response as its logit."""
    return [float(len(request["messages"][-1]["content"]))]


def scorer(url, config=None, **options):
    verifier = as_verifier({"name": "scorer", "model": "rm", "hedge": None, **options})
    verifier.attach(LoadedModels({"rm": FrozenModelConfig(url=url, **(config or {}))}))
    return verifier


def verdicts(verifier, texts, task=TASK):
    return asyncio.run(verifier.verify_group(task, list(texts)))


def test_a_reward_model_at_a_server_sees_the_chat(monkeypatch):
    monkeypatch.setenv("RM_KEY", "secret")
    with StubPoolingServer(length) as server:
        verifier = scorer(f"{server.url}/v1", {"model": "the-rm", "key": "RM_KEY"}, against="reference")
        texts = ["<think>Hm</think>\nIt is 4.", "no"]
        assert [one.score for one in verdicts(verifier, texts)] == [len("It is 4.") - 1, 1]
        assert [one.score for one in verdicts(verifier, texts)] == [len("It is 4.") - 1, 1]
    # The reference once, and each response.
    assert len(server.requests) == 5 and set(server.keys) == {"Bearer secret"}
    path, body = server.requests[0]
    assert path == "/classify"
    assert body == {
        "model": "the-rm",
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        "use_activation": False,
    }
    assert verifier.metrics()["requests"] == 5


def test_a_pair_a_text_and_an_embedding_have_paths_of_their_own():
    def numbers(path, request):
        if path == "/score":
            assert (request["text_1"], request["text_2"]) == ("2 + 2?", "It is 4.")
            return [-3.5]
        if path == "/classify":
            assert request["input"] == "Q 2 + 2? A It is 4. R 4"
            return [0.0, 3.0]
        return {"It is 4.": [3.0, 4.0], "4": [6.0, 8.0], "no": [4.0, -3.0]}[request["input"]]

    with StubPoolingServer(numbers) as server:
        assert verdicts(scorer(server.url, form="pair"), ["It is 4."])[0].score == -3.5
        text = scorer(server.url, template="Q {prompt} A {response} R {answer}", label=1, activation="softmax")
        assert verdicts(text, ["It is 4."])[0].score == pytest.approx(1 / (1 + 2.718281828459045**-3))
        similar = verdicts(scorer(server.url, kind="embedding"), ["It is 4.", "no"])
        assert [one.score for one in similar] == pytest.approx([1, 0])


def test_failures_are_undecided_and_counted_and_a_passing_one_is_tried_again():
    with StubPoolingServer(length, statuses=[503, 500]) as server:
        verifier = scorer(server.url, retries=3)
        assert verdicts(verifier, ["four"])[0].score == 4
        assert verifier.metrics()["failed"] == 2
    with StubPoolingServer(length, statuses=[503] * 9) as server:
        verifier = scorer(server.url, retries=1)
        (verdict,) = verdicts(verifier, ["four"])
        assert verdict.score is None and verifier.metrics()["undecided/unreachable"] == 1
    with StubPoolingServer(length, most=300) as server:
        verifier = scorer(server.url)
        assert [one.score for one in verdicts(verifier, ["four", "4" * 500])] == [4, None]
        assert verifier.metrics()["undecided/too_long"] == 1
    with StubPoolingServer(lambda path, request: [1.0, 2.0]) as server:
        verifier = scorer(server.url)
        (verdict,) = verdicts(verifier, ["four"])
        assert verdict.score is None and "set `label`" in verdict.reason
    # Nobody listens any more.
    verifier = scorer(server.url, retries=0, deadline=5)
    assert verdicts(verifier, ["four"])[0].score is None and verifier.metrics()["undecided/unreachable"] == 1


def test_what_a_server_cannot_do_is_refused(monkeypatch):
    monkeypatch.delenv("RM_KEY", raising=False)
    with pytest.raises(ConfigError, match="RM_KEY with the key"):
        scorer("http://localhost:1", {"key": "RM_KEY"})
    for kind in ("yes_no", "likelihood"):
        with pytest.raises(ConfigError, match="read: probability"):
            scorer("http://localhost:1", kind=kind)
