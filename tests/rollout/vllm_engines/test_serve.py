"""The guard of a server of vLLM: the key that it wants, and no server without one."""

import asyncio

import pytest

from rlvr.rollout.vllm.serve import KEY, RequireKey


def passed(monkeypatch, headers, kind="http"):
    """Whether the guard lets a request through."""
    monkeypatch.setenv(KEY, "secret")
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append(scope)

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "headers": headers, "path": "/x", "method": "OPTIONS"}
    asyncio.run(RequireKey(app)(scope, None, send))
    assert bool(seen) != bool(sent)
    assert seen or sent[0].get("status") == 401 or sent[0]["type"] == "websocket.close"
    return bool(seen)


def test_the_guard_wants_the_very_key(monkeypatch):
    assert passed(monkeypatch, [(b"authorization", b"Bearer secret")])
    assert passed(monkeypatch, [(b"Authorization", b"Bearer secret")], "websocket")
    assert passed(monkeypatch, [], "lifespan")
    for kind in ("http", "websocket"):
        for value in (b"Bearer", b"Bearer ", b"Bearer secret2", b"bearer secret", b"secret", b"Basic secret"):
            assert not passed(monkeypatch, [(b"authorization", value)], kind)
        assert not passed(monkeypatch, [], kind)
        assert not passed(monkeypatch, [(b"authorization", b"Bearer no"), (b"authorization", b"Bearer secret")], kind)


def test_without_a_key_there_is_no_guard_and_no_server(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(RuntimeError, match=KEY):
        RequireKey(None)
