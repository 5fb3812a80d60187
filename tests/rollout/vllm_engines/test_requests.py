"""Requests to vLLM: temperatures that it would raise are refused."""

import pytest

from rlvr.errors import DataError
from rlvr.rollout import Request, Sampling
from rlvr.rollout.vllm import requests


def test_temperatures_that_vllm_would_raise_are_refused():
    assert requests.opened(Request((5,), Sampling(4, 0.0), 0), 96).limit == 4
    with pytest.raises(DataError, match=r"below 0\.01"):
        requests.opened(Request((5,), Sampling(4, 0.005), 0), 96)
