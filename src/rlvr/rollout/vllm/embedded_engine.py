"""The engine `vllm`: vLLM in a process of its own, started by the run and on the trainer's device.

Of its own, because vLLM binds threads to cores and sets torch's number of threads for its whole process, and because a
process can be killed. Weights go through shared memory on a CPU and through CUDA IPC on a GPU, where the engine's
memory is given back while the trainer updates. Invariants: what it samples is labelled by vLLM with the version that
sampled it; its cache of keys and values is taken from the GPU only when the new weights are there and nothing else is
held to send them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable
from typing import Any

from rlvr.core.device_memory import free_cached, record_event
from rlvr.errors import TrainingError
from rlvr.policy import Policy
from rlvr.rollout.engine import Bucket, Completion, InFlight, Published, Request
from rlvr.rollout.vllm import devices, launch, requests
from rlvr.rollout.vllm.adapter import AdapterFiles
from rlvr.rollout.vllm.gate import RequestGate, check_released
from rlvr.rollout.vllm.host import EngineHost
from rlvr.rollout.vllm.model_folder import model_folder, scratch_folder
from rlvr.rollout.vllm.requests import Answer
from rlvr.rollout.vllm.settings import EngineSettings
from rlvr.rollout.vllm.transfer import SHARED_MEMORY, SharedMemoryTransfer, Transfer, mismatched_weights
from rlvr.rollout.weights import described, in_wire_dtype, weight_buckets


class VLLMEngine:
    """See rlvr.rollout.engine.Engine. Requests may come from any event loop."""

    shares_weights = False

    def __init__(self, policy: Policy, options: EngineSettings, in_flight: InFlight | None = None) -> None:
        self.policy = policy
        self.options = options
        self.version = 0
        self._has_weights = False
        on_gpu = policy.home.type != "cpu"
        # in_flight None: no request is open at a publish, nothing to hold back
        # finish: the gate lets open requests end and holds new ones;  continue: neither
        self._gate = RequestGate() if in_flight == "finish" else None
        self._keeps_cache = in_flight == "continue" and not options.clear_cache
        """True if requests under way go on with the keys and values that they have."""
        # With `in_flight` the engine samples while the trainer updates, so its memory cannot be lent.
        self._sleeps = on_gpu and options.sleep and in_flight is None
        self._asleep = False
        self._released = True
        self._end_ids = sorted(policy.end_ids)
        self._folder = scratch_folder()
        model = model_folder(policy, self._folder)
        # CUDA IPC maps memory of one device; workers of a split engine on other devices cannot open it.
        self._by_ipc = on_gpu and options.tensor_parallel_size == 1 and options.transfer != SHARED_MEMORY
        backend = "ipc" if self._by_ipc else SHARED_MEMORY
        arguments = launch.engine_arguments(policy, model, options, backend)
        if self._sleeps:
            arguments["enable_sleep_mode"] = True
        environment = launch.environment(policy, options, self._folder)
        if on_gpu:
            environment[devices.VISIBLE] = devices.beside_trainer(policy.home, options.tensor_parallel_size)
        self._adapter = AdapterFiles(policy, self._folder) if launch.sends_adapter(policy, options) else None
        self._transfer: Transfer | None = None
        try:
            self._host = EngineHost(arguments, environment, self._folder, options.start_timeout)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self.context = min(policy.context, int(self._host.facts["max_model_len"]))
        self._memory = devices.engine_memory(policy, options) if on_gpu else {}
        record_event("engine", "start", sum(self._memory.values()))
        if self._sleeps:
            self._sleep()  # the backend, which is made after the engine, takes its memory meanwhile

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. DataError when the prompt is empty or fills the context."""
        if not self._has_weights:
            raise TrainingError("the vLLM engine has no weights before the first publish")
        item = requests.opened(request, self.context)
        fields = requests.parameters(item, self._end_ids, self.options.structured_outputs)
        async with self._gate.inside() if self._gate else contextlib.nullcontext():
            answer = await self._answer(request, fields)
        return requests.completion(item, answer, self.policy)

    async def _answer(self, request: Request, fields: dict[str, Any]) -> Answer:
        if self._asleep:
            raise TrainingError("the vLLM engine sleeps from `release` until the next publish, and was asked to sample")
        if self._adapter is None:
            return await self._host.generate(request.token_ids, fields, None)
        # For as long as the request is open: its files must not be removed meanwhile.
        with self._adapter.begun() as adapter:
            answer = await self._host.generate(request.token_ids, fields, adapter.fields)
        return dataclasses.replace(answer, adapter=adapter.version)

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> Published:
        """Take new weights, after requests under way are done or, with `continue`, between two of their tokens: what is
        in their caches is then computed anew, unless `clear_cache` is false. An adapter's requests end with the adapter
        that they began with. The version that it has is not sent again before a `release`: the engine is awake, and to
        send takes memory beside it."""
        if self._has_weights and not self._released and version == self.version:
            return Published(0, 0.0)
        with self._gate.emptied(self.options.publish_timeout) if self._gate else contextlib.nullcontext():
            return self._publish(version, weights)

    def _publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> Published:
        check_released(self._released, self.version, version)
        # Order of a publish, for the least peak of GPU memory: wake the memory of the weights, send, free the buffer
        # that they were sent in, and only then wake the cache of keys and values, which takes all that is left.
        self._wake("weights")
        if self._keeps_cache:
            self._call("pause")
        if self._adapter is None:
            published = self._sent(weights)
        else:
            base = None if self._adapter.newest else self._sent(lambda: weight_buckets(self.policy, merged=False))
            published = self._adapter.write(version, base)
            self._adapter.put_to_use()
        free_cached(self.policy.home)  # the buffer that they were sent in
        self._wake("kv_cache")
        self._asleep = False
        # Before `resume`: the first token computed with the new weights must carry the new version.
        self._call("commit", version=str(version), clear_cache=not self._keeps_cache)
        if self._keeps_cache:
            self._call("resume")
        self.version = version
        self._has_weights = True
        self._released = False
        return published

    def release(self) -> None:
        """Give the engine's device memory back until the next publish, where that is set."""
        self._released = True
        if self._adapter is not None:
            self._adapter.release()
        if self._sleeps and not self._asleep:
            self._sleep()

    def mismatched_weights(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
        """Names of tensors that the engine does not hold as they were sent, as far as it can tell."""
        return mismatched_weights(weights, lambda shapes: self._call("rlvr_weights", shapes=shapes), self.policy.dtype)

    def close(self) -> None:
        """End the process and remove what was written for it."""
        # The process first: it may have the memory of `_transfer` mapped and files of the folder open.
        self._host.close()
        if self._transfer is not None:
            self._transfer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _sent(self, weights: Callable[[], Iterable[Bucket]]) -> Published:
        if self._transfer is None:
            self._transfer = self._make_transfer()
        return self._transfer.send(lambda: in_wire_dtype(weights(), self.policy.dtype), self._call)

    def _make_transfer(self) -> Transfer:
        if not self._by_ipc:
            return SharedMemoryTransfer()
        from rlvr.rollout.vllm.gpu_transfer import ipc_transfer

        return ipc_transfer(described(self.policy, merged=self._adapter is None))

    def _sleep(self) -> None:
        """Free the engine's memory. Weights come anew at each publish and are discarded (level 2), but for two cases,
        in which they wait in host memory (level 1): those under an adapter are sent once, and quantised layers have
        tensors that are neither parameters nor buffers, which level 2 does not keep."""
        stays = (self._adapter is not None and self._has_weights) or self.options.quantization is not None
        self._call("sleep", level=1 if stays else 2)
        record_event("engine", "sleep", -sum(self._memory.values()))
        self._asleep = True

    def _wake(self, part: str) -> None:
        if self._asleep:
            record_event("engine", f"wake {part}", self._memory[part])
            self._call("wake_up", tags=[part])

    def _call(self, method: str, **arguments: Any) -> Any:
        what = f"the vLLM engine to do {method}"
        return self._host.call(method, what, self.options.publish_timeout, **arguments)
