"""The engine `vllm-server` with servers of our own in place of vLLM's: what no real server does at a chosen moment."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest
from engine_helpers import small

from rlvr.rollout import Request, Sampling
from rlvr.rollout.vllm import VLLMServerOptions, server_engine
from rlvr.rollout.vllm.client import Client, ServerError
from rlvr.rollout.vllm.engine_process import EngineServer
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
        self.told, self.salts = [], []
        self.answered = time.monotonic()
        self.made.append(self)

    async def generate(self, token_ids, fields, adapter, timeout, cache_salt=None):
        self.salts.append(cache_salt)
        before, self.open = self.version, self.open + 1
        self.begun.set()
        await self.going.wait()
        self.open -= 1
        return Answer([7] * 3, [-1.0] * 3, "length", None, [(before, 0, 2), (self.version, 2, 3)])

    async def call(self, method, timeout, **arguments):
        self.told.append((method, arguments.get("clear_cache")))
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
def opened(monkeypatch):
    """A function that opens an engine with two such servers."""

    async def check(client, policy, options, transfer):
        return policy.context

    monkeypatch.setattr(Server, "made", [], raising=False)
    monkeypatch.setattr(server_engine, "Client", Server)
    monkeypatch.setattr(server_engine, "check_server", check)
    engines = []

    def open_engine(in_flight="continue", **options):
        engines.append(VLLMServerOptions(urls=("a", "b"), restarts=0, **options).open(small(), in_flight))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(opened):
    """An engine with two such servers that goes on sampling while weights are sent."""
    return opened()


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


@pytest.mark.parametrize(
    ("in_flight", "clear_cache", "keeps"),
    [("continue", False, True), ("continue", True, False), ("finish", False, False), (None, False, False)],
)
def test_keys_and_values_are_kept_where_that_is_set(opened, in_flight, clear_cache, keeps):
    """Nothing is cleared then, and requests after a publish are kept from what other weights computed by a salt of
    their own, also of the same version: the run went back to a checkpoint."""
    engine = opened(in_flight, clear_cache=clear_cache)
    request = Request((1, 2, 3), Sampling(3), seed=0)
    for version in (1, 2, 1):
        engine.release()
        engine.publish(version, lambda: ())
        asyncio.run(engine.generate(request))
    servers = [member.client for member in engine._members.all]
    assert sorted(salt or "" for server in servers for salt in server.salts) == (["1", "2", "3"] if keeps else [""] * 3)
    for server in servers:
        pauses = [clears for method, clears in server.told if method == "pause"]
        assert pauses == ([not keeps] * 3 if in_flight == "continue" else [])
        assert [clears for method, clears in server.told if method == "commit"] == [not keeps] * 3


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_server_is_told_what_to_clear_by_vllms_own_parameters(monkeypatch, clear_cache):
    asked = []

    async def ask(self, verb, path, timeout, body=None):
        asked.append((path, body))
        return {"choices": []}

    async def main():
        client = Client("http://a", None, "policy")
        try:
            await client.call("pause", 1.0, mode="keep", clear_cache=clear_cache)
            await client.call("commit", 1.0, version="3", clear_cache=clear_cache)
            for salt in (None, "3"):
                with contextlib.suppress(ServerError):  # it answers nothing
                    await client.generate([5], {}, None, 1.0, salt)
        finally:
            await client.close()

    monkeypatch.setattr(Client, "ask", ask)
    asyncio.run(main())
    body = {"model": "policy", "token_ids": [5], "sampling_params": {}}
    assert asked == [
        (f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}", None),
        *([("/reset_prefix_cache?reset_running_requests=true", None)] if clear_cache else []),
        ("/update_weight_version", {"new_version": "3"}),
        ("/inference/v1/generate", body),
        ("/inference/v1/generate", {**body, "cache_salt": "3"}),
    ]


def test_steps_under_way_are_finished_before_weights_change_under_kept_caches():
    """With asynchronous scheduling, whose tokens are labelled when they are handed out, a step after they were
    sampled."""

    class Core:
        def __init__(self):
            self.batch_queue, self.told = ["a step", "the next"], []

        def pause_scheduler(self, mode, clear_cache):
            self.told.append((mode, clear_cache))

    class Engine:
        def step(self):
            server._core.batch_queue.pop()
            return []

    server = EngineServer.__new__(EngineServer)
    server._core, server.engine = Core(), Engine()
    server._done, server._pauses, server._updating = [], 0, False
    server._call("pause", {})
    assert (server._core.told, server._core.batch_queue) == ([("keep", False)], [])
    assert (server._pauses, server._updating) == (1, True)


@pytest.mark.gate
def test_the_limit_on_open_files_lets_all_completions_have_a_connection():
    program = (
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))\n"
        "from rlvr.rollout.vllm.client import OPEN_FILES, allow_open_files\n"
        "allow_open_files()\n"
        "soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "assert soft == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)), (soft, hard)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
