import pytest

from rlvr.rollout import Collector


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()
