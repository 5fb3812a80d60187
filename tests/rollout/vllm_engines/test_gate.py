"""The gate for requests: it lets nobody in while it is shut, and opens again."""

import asyncio
import threading
import time

import pytest

from rlvr.errors import WaitTimeoutError
from rlvr.rollout.vllm.gate import RequestGate


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
