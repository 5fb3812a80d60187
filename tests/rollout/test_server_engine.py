"""The engine `vllm-server` with servers of our own in place of vLLM's: what no real server does at a chosen moment."""

import asyncio
import threading
import time

import pytest
from engine_helpers import small

from rlvr.rollout import Request, Sampling
from rlvr.rollout.vllm import VLLMServerOptions, server_engine
from rlvr.rollout.vllm.members import State
from rlvr.rollout.vllm.requests import Answer


class Server:
    """One server as its client sees it: three tokens a request, the last of which waits where sampling is paused."""

    made: list["Server"]
    calls = 0

    def __init__(self, url, key, model):
        self.url, self.version, self.going = url, "0", asyncio.Event()
        self.going.set()
        self.open, self.begun = 0, threading.Event()
        self.answered = time.monotonic()
        self.made.append(self)

    async def generate(self, token_ids, fields, adapter, timeout):
        before, self.open = self.version, self.open + 1
        self.begun.set()
        await self.going.wait()
        self.open -= 1
        return Answer([7] * 3, [-1.0] * 3, "length", None, [(before, 0, 2), (self.version, 2, 3)])

    async def call(self, method, timeout, **arguments):
        if method == "pause":
            self.going.clear()
        elif method == "commit":
            self.version = arguments["version"]
        elif method == "resume":
            self.going.set()
            while self.open:  # what was open ends, and is taken, before `resume` has answered
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)

    async def healthy(self, timeout):
        return True

    async def responsive(self, timeout):
        return True

    async def close(self):
        pass


@pytest.fixture
def engine(monkeypatch):
    """An engine with two such servers that goes on sampling while weights are sent."""

    async def check(client, policy, options, transfer):
        return policy.context

    monkeypatch.setattr(Server, "made", [], raising=False)
    monkeypatch.setattr(server_engine, "Client", Server)
    monkeypatch.setattr(server_engine, "check_server", check)
    engine = VLLMServerOptions(urls=("a", "b"), restarts=0).open(small(), "continue")
    yield engine
    engine.close()


def test_a_response_that_ends_while_a_server_resumes_is_of_current_weights(engine):
    """Between a server's `resume` and the end of the publish its tokens already have the new version."""
    engine.publish(1, lambda: ())
    server = engine._members.all[0].client
    server.going.clear()  # the response is open, whatever the machine's load
    request = Request((1, 2, 3), Sampling(3), seed=0)
    answers = []
    sampling = threading.Thread(target=lambda: answers.append(asyncio.run(engine.generate(request))))
    sampling.start()
    assert server.begun.wait(60)
    engine.release()
    engine.publish(2, lambda: ())
    sampling.join(60)
    assert [answer.versions.tolist() for answer in answers] == [[1, 1, 2]]
    assert [(member.state, member.trouble) for member in engine._members.all] == [(State.READY, "")] * 2
