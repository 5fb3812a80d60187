import pytest
import torch

from rlvr.rollout import Collector

torch.set_num_threads(1)


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()
