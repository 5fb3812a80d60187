"""The engine `vllm-server` for real: two servers, their weights, their keys, and what happens when one dies or
hangs."""

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import ask, ask_all, gap, shake, some_requests
from vllm_helpers import (
    FAST,
    check_alternatives,
    check_constraint,
    check_publishing_under_way,
    needs_vllm,
    publish,
    tiny,
)

from process_helpers import alive, children, group_of, until
from rlvr.distributed import PlainBackend
from rlvr.errors import ConfigError, DataError, TrainingError, WaitTimeoutError
from rlvr.records import StopReason
from rlvr.rollout import HFEngine, Request, Sampling, probe
from rlvr.rollout.vllm import VLLMServerOptions, checks, installed
from rlvr.rollout.vllm.members import State

pytestmark = [needs_vllm, pytest.mark.alone, pytest.mark.timeout(900)]
BACK = 300  # seconds: a server starts anew, on a machine with other work


@pytest.fixture(scope="module")
def policy():
    return tiny(context=160)


@pytest.fixture(scope="module")
def engine(policy):
    engine = VLLMServerOptions(**FAST, servers=2, restarts=20, health_every=0.5, health_timeout=15.0).open(policy)
    yield engine
    engine.close()


@pytest.fixture
def published(engine, policy):
    """The engine with both servers ready and the policy's weights as they are."""
    until(lambda: not any(m.returning for m in engine._members.all), BACK, "both servers to be back")
    publish(engine, engine.version + 1, PlainBackend(policy).named_weights)
    assert [m.state for m in engine._members.all] == [State.READY] * 2
    return engine


def test_log_probs_are_the_trainers_after_each_publish(policy, published, collector):
    for number in range(3):
        shake(policy, number)
        version = published.version + 1
        done = publish(published, version, PlainBackend(policy).named_weights)
        assert done.bytes > 0
        requests = some_requests(policy, 12, seed=number, temperature=(1.0, 0.7, 0.0)[number])
        completions = ask(published, requests)
        assert gap(policy, requests, completions) < 1e-4
        assert {v for c in completions for v in c.versions.tolist()} == {version}
        assert probe(published, policy, collector, PlainBackend(policy).named_weights) < 1e-4
        assert published.mismatched_weights(PlainBackend(policy).named_weights) == []


def test_completions_are_those_of_the_hf_engine_where_nothing_is_drawn(policy, published):
    requests = some_requests(policy, 10, seed=3, temperature=0.0, stop=("ab", "c1"))
    for ours, theirs in zip(ask(published, requests), ask(HFEngine(policy), requests), strict=True):
        assert (ours.token_ids.tolist(), ours.stop, ours.text) == (theirs.token_ids.tolist(), theirs.stop, theirs.text)
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_seeds_decide_and_not_the_server(policy, published):
    requests = some_requests(policy, 16, seed=4)
    first = [c.token_ids.tolist() for c in ask(published, requests)]
    assert [c.token_ids.tolist() for c in ask(published, requests[::-1])][::-1] == first
    assert len({tuple(ids) for ids in first}) > 1


def test_weights_published_under_way_are_those_of_the_tokens_after(policy, published):
    check_publishing_under_way(policy, published, publishes=1)


def test_a_constraint_is_kept(policy, published):
    check_constraint(policy, published)


def test_the_likeliest_first_tokens_are_the_policys(policy, published):
    check_alternatives(policy, published)


def test_new_weights_come_after_a_release(policy, published):
    with pytest.raises(TrainingError, match="without a release"):
        published.publish(published.version + 1, PlainBackend(policy).named_weights)


def test_requests_are_spread_over_the_servers(policy, published):
    most = {m.name: 0 for m in published._members.all}

    async def main():
        work = asyncio.ensure_future(ask_all(published, some_requests(policy, 40, seed=5, ignore_eos=True)))
        while not work.done():
            for member in published._members.all:
                most[member.name] = max(most[member.name], len(member.tasks))
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert min(most.values()) > 15  # half of them each; we look from another thread
    assert max(most.values()) <= 20
    assert [m.tokens for m in published._members.all] == [0, 0]


def test_bad_requests_are_the_callers_trouble_and_not_the_servers(policy, published):
    with pytest.raises(DataError, match="a prompt of 160 tokens"):
        ask(published, [Request((5,) * 160, Sampling(4), 0)])
    with pytest.raises(DataError, match="refuses"):
        ask(published, [Request((5,), Sampling(4), 0, constraint={"regex": "(((("})])
    assert [m.state for m in published._members.all] == [State.READY] * 2


def fetch(url, verb="GET", key=None, body=None):
    """The status of a request."""
    headers = {"Content-Type": "application/json", **({"Authorization": key} if key else {})}
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=verb), timeout=20) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_no_endpoint_is_open_without_the_key(published):
    """Every route that the server itself lists, and some that it does not, with no key and with wrong ones."""
    url = published._members.all[0].client.url
    listed = published._run(published._members.all[0].client.ask("GET", "/openapi.json", 30))["paths"]
    assert {"/collective_rpc", "/update_weights", "/pause", "/reset_prefix_cache", "/inference/v1/generate"} <= set(
        listed
    )
    routes = [(path, verb.upper()) for path, verbs in listed.items() for verb in verbs]
    routes += [
        ("/health", "OPTIONS"),
        ("/collective_rpc", "OPTIONS"),
        ("/docs", "GET"),
        ("/metrics", "GET"),
        ("//collective_rpc", "POST"),
    ]
    tried = [(path, verb, fetch(url + path, verb, body={} if verb == "POST" else None)) for path, verb in routes]
    assert [row for row in tried if row[2] != 401] == []
    for key in ("Bearer ", "Bearer wrong", "Basic abc", "bearer"):
        assert fetch(url + "/collective_rpc", "POST", key, {"method": "reset_weights"}) == 401


def test_servers_listen_on_loopback_only_and_keep_the_key_off_the_command_line(published):
    for member in published._members.all:
        assert member.client.url.startswith("http://127.0.0.1:")
        line = Path(f"/proc/{member.started.process.pid}/cmdline").read_text()
        key = member.client._session.headers["Authorization"].removeprefix("Bearer ")
        assert len(key) > 30
        assert key not in line


def test_a_killed_server_costs_no_rollout_and_no_wrong_token(policy, published):
    requests = some_requests(policy, 40, seed=6, longest=6, max_new_tokens=140, ignore_eos=True)
    expected = [c.token_ids.tolist() for c in ask(published, requests)]
    victim = published._members.all[0]
    old = group_of(victim.started.process.pid)
    assert len(old) >= 2  # the server and its engine core
    before = victim.returns

    async def main():
        work = asyncio.ensure_future(ask_all(published, requests))
        while not victim.tasks:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # in the middle of its answers
        os.kill(victim.started.process.pid, signal.SIGKILL)
        return await work

    completions = asyncio.run(main())
    until(lambda: victim.returns > before, 60, "the loss to be noticed")
    assert [c.token_ids.tolist() for c in completions] == expected
    assert gap(policy, requests, completions) < 1e-4
    assert {c.stop for c in completions} == {StopReason.LENGTH}
    until(lambda: victim.state == State.READY, BACK, "the killed server to be back")
    assert not any(map(alive, old))
    published._members.all[1].tokens += 10**6  # so that the server that came back answers alone
    try:
        again = ask(published, requests[:8])
    finally:
        published._members.all[1].tokens -= 10**6
    assert [c.token_ids.tolist() for c in again] == expected[:8]


@pytest.mark.parametrize("hangs", ["the server", "its engine core"])
def test_a_hanging_server_is_found_and_replaced(policy, published, hangs):
    """The HTTP process of a server whose engine core hangs is well."""
    requests = some_requests(policy, 24, seed=7, longest=6, max_new_tokens=140, ignore_eos=True)
    expected = [c.token_ids.tolist() for c in ask(published, requests)]
    victim = published._members.all[0]
    before = victim.returns
    server = victim.started.process.pid
    processes = group_of(server)
    for pid in processes:
        if hangs == "the server" or pid != server:
            os.kill(pid, signal.SIGSTOP)  # before it is asked, so that it owes its answers however fast it is
    completions = ask(published, requests)
    assert [c.token_ids.tolist() for c in completions] == expected
    assert victim.returns == before + 1
    until(lambda: not any(map(alive, processes)), 60, "the hanging processes to be gone")


@pytest.mark.slow
def test_after_release_a_lost_server_stays_stale_until_the_next_publish(policy, published):
    victim, other = published._members.all
    published.release()
    shake(policy, 8)  # the trainer updates: these weights are no version's
    os.kill(victim.started.process.pid, signal.SIGKILL)
    until(lambda: victim.returning, 30, "the loss to be noticed")
    until(lambda: not victim.returning, BACK, "the server to be started anew")
    assert (victim.state, other.state) == (State.STALE, State.READY)
    requests = some_requests(policy, 6, seed=9)
    assert {v for c in ask(published, requests) for v in c.versions.tolist()} == {published.version}
    publish(published, published.version + 1, PlainBackend(policy).named_weights)
    assert victim.state == State.READY
    assert gap(policy, requests, ask(published, requests)) < 1e-4


def test_a_server_with_other_weights_is_not_believed(policy, published):
    victim = published._members.all[0]
    published._run(victim.client.ask("POST", "/update_weight_version", 30, {"new_version": "somebody else's"}))
    completions = ask(published, some_requests(policy, 12, seed=10))
    assert {v for c in completions for v in c.versions.tolist()} == {published.version}
    assert victim.returning or victim.returns


def test_a_taken_port_is_named(policy):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} for vLLM server 0 is taken"):
            VLLMServerOptions(**FAST, port=port).open(policy)


def test_a_server_that_takes_too_long_to_start_is_named_and_gone(policy, published):
    before = set(children())  # none is being started beside it: `published` waits for that
    with pytest.raises(WaitTimeoutError, match="vLLM server 0 did not start in time"):
        VLLMServerOptions(**FAST, start_timeout=0.5).open(policy)
    until(lambda: set(children()) <= before, 20, "the process to end")


def test_a_context_longer_than_the_models_is_refused(policy):
    with pytest.raises(ConfigError, match="max_model_len 161 is longer than the model's context of 160"):
        VLLMServerOptions(**FAST, max_model_len=161).open(policy)


# Servers given by URL


@pytest.fixture
def given(published, monkeypatch):
    """Options that name one of the running servers by its URL."""
    client = published._members.all[1].client
    monkeypatch.setenv("THE_KEY", client._session.headers["Authorization"].removeprefix("Bearer "))
    return {"urls": (client.url,), "api_key_env": "THE_KEY", **FAST}


@pytest.mark.parametrize("transfer", ["shared_memory", "files"])
def test_a_server_given_by_url_takes_weights_and_answers(policy, published, given, transfer):
    engine = VLLMServerOptions(**given, transfer=transfer).open(policy)
    try:
        for version in range(1, 4):
            shake(policy, version)
            publish(engine, version, PlainBackend(policy).named_weights)
            requests = some_requests(policy, 6, seed=version)
            completions = ask(engine, requests)
            assert gap(policy, requests, completions) < 1e-4
            assert {v for c in completions for v in c.versions.tolist()} == {version}
    finally:
        engine.close()
    assert alive(published._members.all[1].started.process.pid)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"alphabet": "lkjihgfedcba 01\n"}, "another tokenizer"),
        ({"hidden_size": 128}, "hidden_size is 64, the policy's 128"),
        ({"layers": 3}, "num_hidden_layers"),
    ],
    ids=["tokenizer", "width", "depth"],
)
def test_a_server_with_another_model_is_refused(given, other, message):
    with pytest.raises(ConfigError, match=message):
        VLLMServerOptions(**given, transfer="shared_memory").open(tiny(context=160, **other))


def test_a_server_that_we_have_no_key_for_is_refused(policy, given):
    with pytest.raises(ConfigError, match=r"closed to us \(401\).*\$NO_KEY"):
        VLLMServerOptions(**{**given, "api_key_env": "NO_KEY"}, transfer="shared_memory").open(policy)


def test_a_server_that_is_not_there_is_named(policy):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        VLLMServerOptions(urls=("http://127.0.0.1:9",)).open(policy)


def test_a_server_that_answers_nothing_is_named(policy, monkeypatch):
    monkeypatch.setattr(checks, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{url} cannot be used: .* did not answer within"):
            VLLMServerOptions(urls=(url,)).open(policy)


def test_a_server_of_another_version_is_refused(policy, given, monkeypatch):
    monkeypatch.setattr(installed, "BEFORE", (0, 32))
    with pytest.raises(ConfigError, match=r"is vLLM 0\.32.*works with 0\.32 up to, not including, 0\.32"):
        VLLMServerOptions(**given, transfer="shared_memory").open(policy)


def test_a_server_that_takes_no_adapters_is_refused(given):
    with pytest.raises(ConfigError, match="takes no adapters"):
        VLLMServerOptions(**given, transfer="shared_memory").open(tiny(context=160, adapter={"r": 4}))


def test_a_transfer_that_the_server_was_not_started_for_is_named(policy, given):
    with pytest.raises(ConfigError, match="by shared_memory, not by nccl"):
        VLLMServerOptions(**given, transfer="nccl").open(policy)
