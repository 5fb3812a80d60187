"""The engine `vllm-server`: one or many vLLM servers, started by the run or given by URL.

Requests go to the server with the least to do. One that dies, hangs or answers with other weights than the current ones
is stale: its open requests are sent to another server with the same seeds, so no rollout is lost and none is of wrong
weights; it is used again once it has the current ones. All HTTP is on a thread of its own, so any event loop may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlvr.core.daemon_calls import awaited_in_daemon
from rlvr.core.waits import finished
from rlvr.errors import DataError, TrainingError
from rlvr.policy import Policy
from rlvr.rollout.engine import Bucket, Completion, InFlight, Published, Request
from rlvr.rollout.vllm import checks, devices, launch, requests
from rlvr.rollout.vllm.adapter import AdapterFiles
from rlvr.rollout.vllm.checks import check_server
from rlvr.rollout.vllm.client import Client, ServerError
from rlvr.rollout.vllm.gate import RequestGate, check_released
from rlvr.rollout.vllm.members import Member, Members, ServerProcess, State
from rlvr.rollout.vllm.model_folder import model_folder, scratch_folder
from rlvr.rollout.vllm.requests import Answer
from rlvr.rollout.vllm.settings import ServerSettings
from rlvr.rollout.vllm.started import CALL, StartedServer
from rlvr.rollout.vllm.transfer import (
    SHARED_MEMORY,
    Call,
    FileTransfer,
    SharedMemoryTransfer,
    Transfer,
    mismatched_weights,
)
from rlvr.rollout.weights import described, has_parts, in_wire_dtype, weight_buckets

T = TypeVar("T")
# A member that is lost in one of these leaves the others waiting inside NCCL; in other methods the rest goes on.
COLLECTIVE = ("init_weight_transfer_engine", "update_weights")
"""Operations that the workers of all servers carry out together by NCCL."""
MODEL = "policy"
"""The name of the policy on servers that the run starts."""


class VLLMServerEngine:
    """See rlvr.rollout.engine.Engine. Requests may come from any event loop."""

    shares_weights = False

    def __init__(self, policy: Policy, options: ServerSettings, in_flight: InFlight | None = None) -> None:
        self.policy = policy
        self.options = options
        self.version = 0
        self._has_weights = False
        self._newest = 0
        """The newest version that a server may label tokens with; ahead of `version` while a publish is under way."""
        self._gate = RequestGate() if in_flight == "finish" else None
        self._end_ids = sorted(policy.end_ids)
        self._transfer_name = options.transfer_to(policy.home)
        self._folder = scratch_folder()
        self._weights: Callable[[], Iterable[Bucket]] | None = None
        self._released = True  # since the last publish
        self._weights_lock = threading.Lock()
        """Held while weights are sent, and while the trainer takes the right to send them back."""
        self._transfer: Transfer | None = None
        self._offsets: dict[ServerProcess, int] = {}
        """First rank of each process's workers in the group of NCCL, where weights go by it."""
        self._pauses = in_flight == "continue"
        """True if requests may come while weights are sent, even where none is open when that begins."""
        self._clears = not self._pauses or options.clear_cache
        """True if a publish has the keys and values of requests under way computed anew."""
        self._publishes = 0
        self._salt: str | None = None
        """Keeps requests from what the weights of other publishes computed, where a publish leaves that in the cache.
        Versions do not: a run that goes back to a checkpoint has one of them twice."""
        self._adapter = AdapterFiles(policy, self._shared()) if launch.sends_adapter(policy, options) else None
        self._with_base: set[ServerProcess] = set()
        """Processes that were sent the weights under the adapter."""
        self._opened: list[Member] = []
        self._watches = contextlib.ExitStack()
        """Ends what watches the servers, once it has begun."""
        self._closing = False
        self._submitting = threading.Lock()
        """Held while work goes to the loop, so that none comes after the work that ends it."""
        # A loop of its own: requests come from the collector's loop, but health checks, restarts and publishes must go
        # on while that loop is blocked or not running.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlvr-vllm-servers", daemon=True)
        self._thread.start()
        try:
            self.context = policy.context
            self._members = self._run(self._open())
        except BaseException:
            self.close()
            raise

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. DataError when the prompt is empty or fills the context."""
        if not self._has_weights:
            raise TrainingError("the vLLM servers have no weights before the first publish")
        item = requests.opened(request, self.context)
        fields = requests.parameters(item, self._end_ids, self.options.structured_outputs)
        timeout = self.options.request_timeout

        async def ask(client: Client) -> Answer:
            if self._adapter is None:
                return await client.generate(request.token_ids, fields, None, timeout, self._salt)
            with self._adapter.begun() as adapter:
                answer = await client.generate(request.token_ids, fields, adapter.name, timeout, self._salt)
            return dataclasses.replace(answer, adapter=adapter.version)

        cost = len(request.token_ids) + item.limit
        # Cancelling the wrapped future cancels the coroutine on the servers' loop, and with it the HTTP request.
        answer = await asyncio.wrap_future(self._submit(self._members.run(cost, ask)))
        return requests.completion(item, answer, self.policy)

    def publish(self, version: int, weights: Callable[[], Iterable[Bucket]]) -> Published:
        """Give every server that answers the new weights, after requests under way are done or, with `continue`,
        between two of their tokens. Where all were lost, the first to come back is waited for. The version that they
        have is not sent again before a `release`. TrainingError when no server takes them."""
        if self._has_weights and not self._released and version == self.version:
            return Published(0, 0.0)
        options = self.options
        members = self._members
        with self._gate.emptied(options.publish_timeout) if self._gate else contextlib.nullcontext():
            # The longest that all tries to bring a server back can take, and one more answer.
            deadline = time.monotonic() + (options.restarts + 1) * options.start_timeout + options.publish_timeout
            up = self._submit(members.one_up())
            finished(up, "a vLLM server that can take the weights", deadline)
            up.result()
            with self._weights_lock:
                check_released(self._released, self.version, version)
                # None while the publish is under way: what a server that comes back is given is only known at its end.
                self._weights = None
                self._publishes += 1
                sound = [member for member in members.all if member.is_up]
                if not sound:
                    raise TrainingError(f"every vLLM server is lost: {members.troubles()}")
                published = self._give(sound, version, weights)
                self.version = version
                self._weights = weights
                self._has_weights = True
                self._released = False
            # After the weights lock was given up: it may begin a `_catch_up`, which takes that lock in another thread.
            self._run(members.published())
        return published

    def release(self) -> None:
        """From now on the weights may change: a server that was lost stays stale until the next publish."""
        with self._weights_lock:
            self._weights = None
            self._released = True
            self._members.publish_comes = True
            if self._adapter is not None:
                self._adapter.release()

    def mismatched_weights(self, weights: Callable[[], Iterable[Bucket]]) -> list[str]:
        """Names of tensors that a server does not hold as they were sent, as far as they can tell."""

        def ask(shapes: dict[str, list[int]]) -> list[dict[str, Any]]:
            ready = [member.process for member in self._members.all if member.state == State.READY]
            return [worker for found in self._all(ready, "rlvr_weights", {"shapes": shapes}) for worker in found]

        return mismatched_weights(weights, ask, self.policy.dtype)

    def close(self) -> None:
        """Give up what is under way, and end the servers that the run started and the thread."""
        with self._submitting:
            if self._closing:
                return
            self._closing = True
            # The last work that the loop gets: `_submitting` is held, and `_closing` refuses what comes later.
            shut = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
        # 30 s: 10 for tasks that are cancelled, the rest for processes to end. Whatever is left then dies with the
        # trainer (parent_death), so closing goes on.
        with contextlib.suppress(Exception):
            shut.result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()
        # A thread that was sending weights has been interrupted, and lets go of what is closed here. At most 10 s: one
        # that is stuck in a send must not keep the program from ending.
        idle = self._weights_lock.acquire(timeout=10)
        if self._transfer is not None:
            self._transfer.close()
        if self._adapter is not None:
            self._adapter.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if idle:
            self._weights_lock.release()

    # opening and shutting, on the loop

    async def _open(self) -> Members:
        options = self.options
        count = self.options.servers
        if options.urls:
            key = os.environ.get(options.api_key_env)
            for url in options.urls:
                client = Client(url, key, "")
                self._opened.append(Member(url, client, None))
                self.context = min(self.context, await check_server(client, self.policy, options, self._transfer_name))
        else:
            model = model_folder(self.policy, self._folder)
            shown: list[str | None] = [None] * count
            if self.policy.home.type != "cpu":
                each = options.tensor_parallel_size * options.data_parallel_size
                shown = [*devices.of_servers(self.policy.home, count, each, options.devices)]
            # All at once: each start takes tens of seconds, most of it imports and compilation.
            await asyncio.gather(*(self._start(number, model, shown[number]) for number in range(count)))
        health = (options.health_every, options.health_timeout)
        members = Members(
            self._opened,
            self._catch_up,
            lambda: has_parts(self.policy),
            self._is_current,
            self._gate.inside if self._gate else contextlib.nullcontext,
            options.restarts,
            options.start_timeout,
            health,
        )
        members.watch()
        self._watches.callback(members.close)
        return members

    async def _start(self, number: int, model: Path, shown: str | None) -> None:
        """Start a server on the GPUs `shown`, for the configuration and tokenizer in `model`."""
        options = self.options
        arguments = launch.engine_arguments(self.policy, model, options, self._backend())
        arguments["data_parallel_size"] = options.data_parallel_size
        environment = launch.environment(self.policy, options, self._folder)
        if shown is not None:
            environment[devices.VISIBLE] = shown
        port = None if options.port is None else options.port + number
        started = StartedServer(f"vLLM server {number}", arguments, environment, self._folder, port, MODEL)
        client = await started.start(options.start_timeout)
        self._opened.append(Member(started.name, client, started))
        # vLLM may have chosen a shorter context than the model's, to fit the memory for keys and values.
        card = (await client.ask("GET", "/v1/models", checks.SECONDS))["data"][0]
        self.context = min(self.context, int(card.get("max_model_len") or self.context))

    async def _shut(self) -> None:
        """Cancel all that is under way, which ends the waits of other threads for it too, and then end the servers."""
        self._watches.close()
        if under_way := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way, timeout=10)
        await asyncio.gather(*(member.client.close() for member in self._opened), return_exceptions=True)
        ends = [awaited_in_daemon(member.started.end, CALL) for member in self._opened if member.started]
        await asyncio.gather(*ends, return_exceptions=True)

    # weights

    def _shared(self) -> Path:
        """The folder that servers read."""
        if self.options.weights_dir:
            return Path(self.options.weights_dir)
        return self._folder

    def _backend(self) -> str:
        """The transfer as vLLM's registry knows it: files are read as shared memory is."""
        if self._transfer_name == "nccl":
            return "nccl"
        return SHARED_MEMORY

    def _make_transfer(self, processes: list[ServerProcess]) -> Transfer:
        name = self._transfer_name
        if name == "nccl":
            from rlvr.rollout.vllm.gpu_transfer import nccl_transfer

            sizes = self._all(processes, "get_world_size", {})
            # Rank 0 of the NCCL group is the trainer; each server's workers (tensor x data parallel) follow in this
            # order.
            self._offsets = {process: 1 + sum(sizes[:place]) for place, process in enumerate(processes)}
            stall_timeout = self.options.stall_timeout or math.inf
            weights = described(self.policy, merged=self._adapter is None)
            return nccl_transfer(weights, self.options.address, sum(sizes), self.options.publish_timeout, stall_timeout)
        if name == "files":
            # A random name: several runs may share `weights_dir`.
            return FileTransfer(self._shared() / f"weights-{secrets.token_hex(4)}")
        return SharedMemoryTransfer()

    def _give(self, members: list[Member], version: int, weights: Callable[[], Iterable[Bucket]]) -> Published:
        """Weights, or the adapter, to these servers; those that fail are dropped and brought back."""
        # `_all` removes what is lost from this list, so that each later method goes to the rest.
        sound = [member.process for member in members]

        def call(method: str, **arguments: Any) -> Any:
            count = len(sound)
            results = self._all(sound, method, arguments)
            if self._offsets and len(sound) < count and method in COLLECTIVE:
                raise TrainingError(
                    f"{count - len(sound)} of {count} vLLM servers were lost in {method}: a broadcast by NCCL cannot "
                    "go on without them, and the others wait for it; go on with --resume auto, or set "
                    "rollout.engine's transfer to files"
                )
            return results

        busy = self._pauses or any(member.tasks for member in members)
        if busy:  # they wait where they are, and go on with the new weights
            # Also where no request is open now (`_pauses`): one may come while the weights are half sent.
            call("pause", mode="keep", clear_cache=self._clears)
        if not self._clears:  # from here on nothing is computed until `resume`, and then with the new weights
            self._salt = str(self._publishes)
        if self._transfer is not None and self._offsets and set(self._offsets) != set(sound):
            # A group of NCCL can neither lose nor take in a process. Both ends abort it (vLLM's
            # PyNcclCommunicator.destroy), which waits for no other.
            call("shutdown_weight_transfer_engine")
            self._transfer.close()
            self._transfer = None
        if self._transfer is None:
            self._transfer = self._make_transfer(sound)
        published = self._give_adapter(sound, version, call) if self._adapter else self._sent(weights, call)
        # Before any server commits: from then on it may answer with tokens of this version, and be asked to go on
        # before the others are.
        self._newest = version
        call("commit", version=str(version), clear_cache=self._clears)
        if busy:
            call("resume")
        self._run(self._members.ready(sound))
        return published

    def _give_adapter(self, sound: list[ServerProcess], version: int, call: Call) -> Published:
        """The adapter of this version, after the weights under it where a process has none. Then they go to all: what
        is broadcast by NCCL has to be taken by the whole group."""
        assert self._adapter is not None and self._transfer is not None
        base = None
        # A process that was started anew has random weights under the adapter.
        if not self._with_base.issuperset(sound):
            base = self._sent(lambda: weight_buckets(self.policy, merged=False), call)
            self._with_base |= set(sound)
        published = self._adapter.write(version, base)
        assert self._adapter.newest is not None
        call("load_lora_adapter", **self._adapter.newest.fields)
        # Only after all servers have loaded it: a request that begins with it may go to any of them.
        self._adapter.put_to_use()
        return published

    def _sent(self, weights: Callable[[], Iterable[Bucket]], call: Call) -> Published:
        assert self._transfer is not None
        return self._transfer.send(lambda: in_wire_dtype(weights(), self.policy.dtype), call)

    def _catch_up(self, member: Member) -> bool:
        """Give a server that came back the current weights; False when it has to wait for the next publish: the trainer
        is about to change them, others of its group sample, or other ranks have parts of them."""
        with self._weights_lock:
            # None between `release` and the next publish: the optimizer writes the tensors that `weights` would read.
            if self._closing or self._weights is None or has_parts(self.policy):
                return False
            members = [member]
            if self._transfer_name == "nccl":
                # A broadcast is for a whole group, and must not disturb servers that sample: the next publish makes a
                # group of all. Where none samples, all can be sent to now.
                others = [other for other in self._members.all if other is not member]
                if any(other.state == State.READY for other in others):
                    return False
                members += [other for other in others if other.is_up]
            if self.policy.home.type != "cpu":
                torch.cuda.set_device(self.policy.home)  # each thread has its own, and NCCL and vLLM ask for it
            self._give(members, self.version, self._weights)
            return True

    def _all(self, processes: list[ServerProcess], method: str, arguments: dict[str, Any]) -> list[Any]:
        """A method on these servers at once; those that fail, or whose process is another by now, are lost and leave
        the list. TrainingError when none is left."""

        async def one(process: ServerProcess) -> Any:
            member = process[0]
            sent = arguments
            if member.process != process:
                return ServerError("it was started anew meanwhile")
            if method == "init_weight_transfer_engine":  # each server's workers have ranks of their own
                sent = {"init_info": {**arguments["init_info"], "rank_offset": self._offsets[process]}}
            try:
                return await member.client.call(method, self.options.publish_timeout, **sent)
            except (ServerError, DataError) as error:
                return error

        async def every() -> list[Any]:
            return await asyncio.gather(*(one(process) for process in processes))

        # On the caller's thread, which waits: publishes and catch-ups are never called on the loop itself.
        results = self._run(every())
        for process, result in list(zip(processes, results, strict=True)):
            if isinstance(result, Exception):
                processes.remove(process)
                self._run(self._members.lose(process[0], f"{method}: {result}"))
        if not processes:
            reasons = "; ".join(map(str, results)) or self._members.troubles()
            raise TrainingError(f"no vLLM server took {method}: {reasons}")
        return [result for result in results if not isinstance(result, Exception)]

    def _is_current(self, answer: Answer) -> bool:
        """Return True if an answer's tokens are all of versions that were published, up to the one being published."""
        # A server that was restarted by its owner labels its tokens "default" or a number of another run.
        labels = [version for version, _, _ in answer.versions]
        return bool(labels) and all(label.isdigit() and int(label) <= self._newest for label in labels)

    # the loop's thread

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._submitting:
            if self._closing:
                # Else Python warns of a coroutine that was never awaited.
                coroutine.close()
                raise TrainingError("the engine vllm-server was closed, and is asked for more")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._submit(coroutine).result()
