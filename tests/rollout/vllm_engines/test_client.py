"""The client of a server: limits of time, and a busy server that closes idle connections."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from rlvr.rollout.vllm.client import Client, ServerError


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
