"""Lines of the hub's client about retries, written by its own loop of retries against a port that nobody listens on."""

from __future__ import annotations

import logging
import socket

import datasets
import pytest
from huggingface_hub.utils import _http as client

from rlvr.config import ModelConfig
from rlvr.core.hub_retries import without_retry_lines
from rlvr.data import load_tasks
from rlvr.errors import ConfigError, DataError
from rlvr.policy import loading

LOGGER = logging.getLogger(client.__name__)


@pytest.fixture
def lines(monkeypatch):
    """What the client logs. The tests' offline mode, in which it asks nothing, is off: only this machine is asked."""
    monkeypatch.setattr(client.constants, "is_offline_mode", lambda: False)
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    LOGGER.addHandler(handler)
    yield found
    LOGGER.removeHandler(handler)


def ask(*_, **__):
    """A request that fails twice; the error is one of those that `datasets` and `transformers` make of it."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    try:
        client.http_backoff("HEAD", f"http://127.0.0.1:{port}/x", max_retries=1, base_wait_time=0)
    except client.httpx2.ConnectError as error:
        raise ConnectionError("the hub cannot be reached") from error


def test_the_client_writes_a_line_for_each_try_and_each_wait(lines):
    with pytest.raises(ConnectionError):
        ask()
    assert len(lines) == 3


def test_a_data_set_or_model_that_cannot_be_loaded_is_named_without_them(lines, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", ask)
    with pytest.raises(DataError, match=r"'org/name' is no file or folder .*the hub cannot be reached"):
        load_tasks("org/name")
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", ask)
    with pytest.raises(
        ConfigError,
        match="the hub model 'org/name' cannot be loaded, and there is no folder of this name here: the hub cannot",
    ):
        loading.load_policy(ModelConfig(path="org/name", device="cpu"))
    assert lines == []


def test_a_wait_for_the_rate_limit_is_shown(lines):
    with without_retry_lines():
        LOGGER.warning("HTTP Error 429 thrown while requesting HEAD https://huggingface.co/x")
        LOGGER.warning("Rate limited. Waiting 240.0s before retry [Retry 1/5].")
    LOGGER.warning("Retrying in 1s [Retry 1/5].")
    assert [line.split()[0] for line in lines] == ["Rate", "Retrying"]
