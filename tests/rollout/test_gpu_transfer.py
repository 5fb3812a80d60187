"""The trainer's end of a publish by NCCL, with vLLM's sending engine replaced: it needs a GPU."""

import threading

import pytest
import torch
from vllm_helpers import needs_vllm

from rlvr.errors import TrainingError, WaitTimeout

pytestmark = needs_vllm


def test_a_send_that_waits_for_a_server_which_is_gone_is_named_and_given_up(monkeypatch):
    from rlvr.rollout.vllm import gpu_transfer

    made, released = [], threading.Event()

    class Sender:
        """Broadcasts to a group: it hangs while a member is gone."""

        def __init__(self, hangs):
            self.hangs, self.client, self.closed = hangs, None, False

        def send_weights(self):
            if self.hangs == "fails":
                raise TrainingError("no vLLM server took update_weights")
            if self.hangs:
                released.wait(60)

        def shutdown(self):
            self.closed = True

    def init(info, client, source):
        made.append(Sender(hangs.pop(0)))
        return made[-1]

    monkeypatch.setattr(gpu_transfer.WeightTransferTrainerFactory, "trainer_init", init)
    hangs = [True, False, "fails"]
    transfer = gpu_transfer.nccl_transfer("127.0.0.1", 2, 0.5)
    weights = lambda: [[("a", torch.zeros(3))]]  # noqa: E731
    try:
        with pytest.raises(WaitTimeout, match="for the weights to reach all vLLM servers"):
            transfer.send(weights, lambda *_, **__: None)
        assert not made[0].closed  # closing the group would wait as well
        assert transfer.send(weights, lambda *_, **__: None).bytes == 12
        transfer.close()
        assert made[1].closed
        with pytest.raises(TrainingError, match="no vLLM server took"):
            transfer.send(weights, lambda *_, **__: None)
    finally:
        released.set()
