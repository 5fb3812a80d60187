"""Servers that are started: their arguments on the command line, and a port that is taken."""

import asyncio
import os
import socket

import pytest

from rlvr.core.process import child_process
from rlvr.errors import ConfigError, WaitTimeoutError
from rlvr.rollout.vllm.started import StartedServer, check_free, flags, free_port


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
