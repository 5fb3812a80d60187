"""Servers that are started: their arguments on the command line, and a port that is taken."""

import socket

import pytest

from rlvr.errors import ConfigError
from rlvr.rollout.vllm.started import check_free, flags, free_port


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
