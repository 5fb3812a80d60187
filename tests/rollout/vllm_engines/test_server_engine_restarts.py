"""Servers that die and are started anew between publishes: the engine's own code, with vLLM's processes replaced.

A new process of a server has weights of no meaning (`load_format: dummy`), no adapter and no group of NCCL.
"""

import asyncio
import threading
import time

import pytest
import torch
from engine_helpers import PATIENCE, small
from safetensors.torch import load_file
from test_gpu_engine import gpus, on_gpu  # noqa: F401
from vllm_helpers import needs_vllm
from without_cuda import without_cuda

from process_helpers import until
from rlvr.core.waits import Wait
from rlvr.distributed import PlainBackend
from rlvr.errors import ConfigError, TrainingError
from rlvr.rollout import Request, Sampling
from rlvr.rollout.vllm import VLLMServerOptions, devices, server_engine
from rlvr.rollout.vllm.client import ServerError
from rlvr.rollout.vllm.members import State
from rlvr.rollout.vllm.requests import Answer

pytestmark = needs_vllm


class Process:
    """A server's process as its client sees it: what it was told, in order."""

    def __init__(self):
        self.told, self.group = [], None
        self.answered = time.monotonic()
        self.calls = 0

    async def ask(self, verb, path, timeout):
        return {"data": [{"max_model_len": 96}]}

    async def call(self, method, timeout, **arguments):
        self.told.append((method, arguments))
        if method == "get_world_size":
            return 1
        if method == "init_weight_transfer_engine":
            self.group = arguments["init_info"]
        if method == "shutdown_weight_transfer_engine":
            self.group = None
        if method == "update_weights" and "path" not in arguments["update_info"] and self.group is None:
            raise ServerError("NCCL weight transfer not initialized")  # as vLLM's workers say
        return None

    async def generate(self, token_ids, fields, adapter, timeout, cache_salt=None):
        version = [arguments for method, arguments in self.told if method == "commit"][-1]["version"]
        return Answer([7] * 3, [-1.0] * 3, "length", None, [(version, 0, 3)])

    async def responsive(self, timeout):
        return True

    async def close(self):
        """Nothing is held."""

    @property
    def methods(self):
        return [method for method, _ in self.told]


class Started:
    """A server of the run: each start is a new process."""

    def __init__(self, name, arguments, environment, *_):
        self.name, self.arguments, self.environment = name, arguments, environment

    async def start(self, timeout):
        return Process()

    def explain(self):
        """Nothing to tell."""
        return ""

    def end(self):
        """Nothing runs."""


@pytest.fixture
def opened(monkeypatch):
    """`opened(policy, transfer)`: an engine with two such servers, or more."""
    monkeypatch.setattr(server_engine, "StartedServer", Started)
    made = []

    def opened(policy, transfer, servers=2, in_flight=None, **options):
        made.append(VLLMServerOptions(servers=servers, transfer=transfer, **options).open(policy, in_flight))
        return made[-1]

    yield opened
    for engine in made:
        engine.close()


def restarted(engine, member):
    """The new process of a server that died."""
    before = member.client
    engine._run(engine._members.lose(member, "it was killed"))
    until(lambda: not member.returning, PATIENCE, "the server to be back")
    assert member.client is not before
    return member.client


@pytest.fixture
def may_start(monkeypatch):
    """Set, servers may be started anew."""
    allowed, start = threading.Event(), Started.start

    async def start_when_allowed(started, timeout):
        if not first(started):
            await asyncio.to_thread(allowed.wait, PATIENCE)
        return await start(started, timeout)

    begun = []

    def first(started):
        begun.append(started)
        return begun.count(started) == 1

    monkeypatch.setattr(Started, "start", start_when_allowed)
    yield allowed
    allowed.set()


def sampled(engine):
    """The version of a response."""
    request = Request((1, 2, 3), Sampling(3), seed=0)
    completion = asyncio.run(asyncio.wait_for(engine.generate(request), PATIENCE))
    return completion.versions.tolist()[0]


@pytest.mark.parametrize("transfer", ["shared_memory", "files"])
def test_a_server_restarted_in_an_update_gets_the_weights_under_the_adapter(opened, transfer):
    policy = small(adapter={"r": 2})
    engine, weights = opened(policy, transfer), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    lost, sound = engine._members.all
    whole = sound.client.methods
    assert whole[0] == "start_weight_update"
    assert whole[-3:] == ["finish_weight_update", "load_lora_adapter", "commit"]
    engine.publish(0, weights)  # as an evaluation does
    assert sound.client.methods == whole
    assert restarted(engine, lost).methods == whole  # while the weights are current, at once
    assert lost.state == State.READY
    sound.client.told.clear()
    engine.release()
    process = restarted(engine, lost)
    assert (process.methods, lost.state) == ([], State.STALE)  # the trainer changes the weights
    engine.publish(1, weights)
    assert process.methods == whole
    assert sound.client.methods == whole
    assert [member.state for member in engine._members.all] == [State.READY] * 2


def test_what_a_lost_server_left_is_told_before_it_is_ended(opened, monkeypatch, caplog):
    engine = opened(small(), "files")
    engine.publish(0, PlainBackend(engine.policy).named_weights)
    member = engine._members.all[0]
    ended = []
    monkeypatch.setattr(member.started, "end", lambda: ended.append(True))
    monkeypatch.setattr(member.started, "explain", lambda: f"stacks, ended {len(ended)} times")
    restarted(engine, member)
    assert "is started anew; the log of its process ends with:\nstacks, ended 0 times" in caplog.text
    assert ended == [True]


def test_a_server_that_returns_waits_for_the_next_publish_where_ranks_have_parts_of_the_weights(opened):
    """Under ZeRO-3 all ranks gather together: rank 0 alone would wait for the others for ever."""
    policy = small()
    engine, weights = opened(policy, "shared_memory"), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    lost = engine._members.all[0]
    for number, parameter in enumerate(policy.model.parameters()):
        parameter.ds_id = number  # as DeepSpeed marks what it shares out
    process = restarted(engine, lost)
    assert (process.methods, lost.state) == ([], State.STALE)
    for parameter in policy.model.parameters():
        del parameter.ds_id
    engine.release()
    engine.publish(1, weights)
    assert lost.state == State.READY


def test_a_server_lost_after_it_took_the_weights_is_not_used_before_it_is_back(opened, may_start, monkeypatch):
    """Between the last answer of a publish and its end: the new process has none of the weights that the old one
    took."""
    policy = small()
    engine, weights = opened(policy, "shared_memory"), PlainBackend(policy).named_weights
    lost = engine._members.all[0]
    call = Process.call

    async def dies_after_commit(process, method, timeout, **arguments):
        await call(process, method, timeout, **arguments)
        if method == "commit" and process is lost.client:
            await engine._members.lose(lost, "it was killed")

    monkeypatch.setattr(Process, "call", dies_after_commit)
    engine.publish(0, weights)
    assert lost.state == State.STALE
    monkeypatch.setattr(Process, "call", call)
    may_start.set()
    until(lambda: not lost.returning, PATIENCE, "the server to be back")
    assert lost.state == State.READY
    assert lost.client.methods[-1] == "commit"


def test_another_adapter_of_the_same_version_is_written_and_loaded(opened):
    """As where the run goes back to a checkpoint: a version that was published before, with other weights."""
    policy = small(adapter={"r": 2})
    engine, weights = opened(policy, "shared_memory"), PlainBackend(policy).named_weights
    lost, sound = engine._members.all

    def loaded(process):
        return process.told[process.methods.index("load_lora_adapter")][1]

    engine.publish(0, weights)
    before = loaded(sound.client)
    restarted(engine, lost)
    assert loaded(lost.client) == before  # nothing has changed
    sound.client.told.clear()
    engine.release()
    for parameter in policy.trainable().values():
        parameter.data.fill_(0.5)
    engine.publish(0, weights)
    after = loaded(sound.client)
    assert (after["lora_int_id"], after["lora_name"]) != (before["lora_int_id"], before["lora_name"])
    held = load_file(f"{after['lora_path']}/adapter_model.safetensors")
    assert held and all((tensor == 0.5).all() for tensor in held.values())


@pytest.mark.parametrize("adapter", [None, {"r": 2}])
def test_a_restarted_server_takes_part_in_the_next_broadcast(opened, monkeypatch, adapter):
    """NCCL's group is made anew, of all servers; with an adapter the weights under it go to all of them."""
    without_cuda(monkeypatch.setattr, "cpu")
    policy = small(adapter=adapter, dtype="bfloat16")
    engine, weights = opened(policy, "nccl"), PlainBackend(policy).named_weights
    members = engine._members.all
    update = ["start_weight_update", "update_weights", "finish_weight_update"]
    last = ["load_lora_adapter", "commit"] if adapter else ["commit"]
    engine.publish(0, weights)
    old = members[0].client.group["master_port"]
    assert [m.client.methods for m in members] == [
        ["get_world_size", "init_weight_transfer_engine", *update, *last],
    ] * 2
    for member in members:
        member.client.told.clear()
    engine.release()
    engine.publish(1, weights)
    assert [m.client.methods for m in members] == [last if adapter else [*update, *last]] * 2
    restarted(engine, members[1])
    assert members[1].state == State.STALE  # a broadcast is for all, so it waits for the next publish
    members[0].client.told.clear()
    engine.release()
    engine.publish(2, weights)
    again = ["shutdown_weight_transfer_engine", "get_world_size", "init_weight_transfer_engine", *update, *last]
    assert [m.client.methods for m in members] == [again] * 2
    groups = [m.client.group for m in members]
    assert sorted(group["rank_offset"] for group in groups) == [1, 2]
    assert {group["world_size"] for group in groups} == {3}
    assert len({group["master_port"] for group in groups} - {old}) == 1
    assert [m.state for m in members] == [State.READY] * 2


def test_a_process_that_is_replaced_within_a_publish_is_told_nothing_more(opened):
    """It would have weights in part, or an adapter without those under it."""
    policy = small(adapter={"r": 2})
    engine, backend = opened(policy, "shared_memory"), PlainBackend(policy)
    lost, sound = engine._members.all

    def replaced():
        before = lost.client
        engine._run(engine._members.lose(lost, "a request failed"))
        until(lambda: lost.client is not before, PATIENCE, "the new process")

    write = engine._adapter.write

    def written(*arguments):  # when the weights under the adapter are there
        replaced()
        engine._adapter.write = write
        return write(*arguments)

    engine._adapter.write = written
    engine.publish(0, backend.named_weights)
    assert sound.state == State.READY
    until(lambda: not lost.returning, PATIENCE, "the server to be back")
    assert lost.state == State.READY
    assert lost.client.methods == sound.client.methods  # all of it, and in one go


def test_all_servers_lost_while_sampling_by_nccl_get_the_weights_at_once(opened, may_start, monkeypatch):
    """The trainer waits for the responses, so there is no next publish to wait for."""
    without_cuda(monkeypatch.setattr, "cpu")
    policy = small(dtype="bfloat16")
    engine, weights = opened(policy, "nccl", servers=3), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    *early, late = engine._members.all
    may_start.set()
    for member in early:
        restarted(engine, member)
    assert [member.state for member in engine._members.all] == [State.STALE, State.STALE, State.READY]
    may_start.clear()
    engine._run(engine._members.lose(late, "it was killed"))
    assert sampled(engine) == 0
    assert [member.state for member in engine._members.all] == [State.READY, State.READY, State.STALE]
    assert sorted(member.client.group["rank_offset"] for member in early) == [1, 2]
    assert {member.client.group["world_size"] for member in early} == {3}
    may_start.set()
    until(lambda: not late.returning, PATIENCE, "the last server to be back")
    assert (late.state, late.client.methods) == (State.STALE, [])  # the others sample
    engine.release()
    engine.publish(1, weights)
    assert [member.state for member in engine._members.all] == [State.READY] * 3
    assert {member.client.group["world_size"] for member in engine._members.all} == {4}
    assert sampled(engine) == 1


def test_all_servers_lost_while_sampling_end_the_run_where_ranks_have_parts_of_the_weights(opened):
    policy = small()
    engine, weights = opened(policy, "shared_memory"), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    for number, parameter in enumerate(policy.model.parameters()):
        parameter.ds_id = number
    first, second = engine._members.all
    restarted(engine, first)
    assert sampled(engine) == 0
    restarted(engine, second)
    with pytest.raises(
        TrainingError, match=r"need weights that only the next publish can give: .*it was killed.*--resume auto"
    ):
        sampled(engine)
    for parameter in policy.model.parameters():
        del parameter.ds_id
    engine.release()  # from here on the next publish comes, whoever waits for it
    answers = []
    sampling = threading.Thread(target=lambda: answers.append(sampled(engine)))
    sampling.start()
    engine.publish(1, weights)
    sampling.join(PATIENCE)
    assert answers == [1]


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_a_publish_waits_for_the_only_server_to_come_back(opened, may_start, in_flight):
    """Responses ahead that were open at it are sampled by the new weights, and the publish does not wait for them."""
    policy = small()
    engine, weights = opened(policy, "shared_memory", 1, in_flight), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    (member,) = engine._members.all
    engine.release()
    engine._run(engine._members.lose(member, "it was killed"))
    answers = []
    sampling = threading.Thread(target=lambda: answers.append(sampled(engine)))
    publishing = threading.Thread(target=engine.publish, args=(1, weights))
    sampling.start()
    publishing.start()
    until(
        lambda: any("a vLLM server that can take" in str(wait) for wait in list(Wait.under_way.values())),
        PATIENCE,
        "the publish to wait",
    )
    may_start.set()
    publishing.join(PATIENCE)
    sampling.join(PATIENCE)
    assert (member.state, answers) == (State.READY, [1])


def test_a_server_whose_loss_was_not_seen_is_started_anew_at_the_publish(opened, monkeypatch):
    policy = small()
    engine, weights = opened(policy, "shared_memory", 1), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    (member,) = engine._members.all
    gone = member.client

    async def responsive(process, timeout):
        return process is not gone

    async def refused(started, timeout):
        raise ConfigError("the GPU fell off the bus")

    monkeypatch.setattr(Process, "responsive", responsive)
    engine.release()
    engine.publish(1, weights)
    assert member.client is not gone
    assert (member.state, member.client.methods[-1]) == (State.READY, "commit")
    gone = member.client
    monkeypatch.setattr(Started, "start", refused)
    engine.release()
    with pytest.raises(TrainingError, match=r"every vLLM server is lost: vLLM server 0: ConfigError: the GPU fell off"):
        engine.publish(2, weights)


def test_servers_of_a_policy_on_a_gpu_are_placed_beside_it_and_sent_to_from_it(opened, gpus):  # noqa: F811
    """Its weights may wait elsewhere (ZeRO-3 under offload): here they are on the CPU."""
    without_cuda(gpus.setattr, "cpu")
    current = []
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    gpus.setattr(torch.cuda, "set_device", current.append)
    policy = on_gpu(small(dtype="bfloat16"), 1)
    engine = opened(policy, "auto", stall_timeout=7.0)
    members = engine._members.all
    placed = {member.name: member.started.environment[devices.VISIBLE] for member in members}
    assert placed == {"vLLM server 0": "0", "vLLM server 1": "2"}
    for member in members:
        assert member.started.arguments["weight_transfer_config"] == {"backend": "nccl"}
    engine.publish(0, PlainBackend(policy).named_weights)
    assert engine._transfer.stall_timeout == 7.0
    for member in members:
        engine._run(engine._members.lose(member, "it was killed"))
    assert sampled(engine) == 0
    assert set(current) == {
        policy.home
    }  # on the thread that gave them the weights again, which NCCL's communicator is made on


def test_a_server_that_waits_gets_the_weights_where_the_one_that_sampled_is_given_up(opened, monkeypatch):
    """It is lost when the other was just told to wait, by which time nobody was to give that one the weights."""
    without_cuda(monkeypatch.setattr, "cpu")
    policy = small(dtype="bfloat16")
    engine = opened(policy, "nccl", restarts=1)
    engine.publish(0, PlainBackend(policy).named_weights)
    back, sampling = engine._members.all
    sampling.returns = 1
    catch_up = engine._members._catch_up

    def loses_the_other(member):
        given = catch_up(member)
        if not given:
            engine._run(engine._members.lose(sampling, "it was killed"))
            until(lambda: sampling.state == State.GONE, PATIENCE, "the other to be given up")
        return given

    engine._members._catch_up = loses_the_other
    engine._run(engine._members.lose(back, "it was killed"))
    until(lambda: sampling.state == State.GONE, PATIENCE, "the other to be lost")
    assert sampled(engine) == 0
    assert [member.state for member in engine._members.all] == [State.READY, State.GONE]


def test_a_server_that_does_not_take_the_weights_of_its_return_is_started_anew(opened, may_start, monkeypatch, caplog):
    """Another of its group takes them, so to give them does not fail as a whole."""
    without_cuda(monkeypatch.setattr, "cpu")
    policy = small(dtype="bfloat16")
    engine = opened(policy, "nccl", servers=3)
    engine.publish(0, PlainBackend(policy).named_weights)
    deaf, other, last = engine._members.all
    may_start.set()
    for member in (deaf, other):
        restarted(engine, member)
    hung, call = deaf.client, Process.call

    async def unless_hung(process, method, timeout, **arguments):
        if process is hung:
            raise ServerError("connection refused")
        return await call(process, method, timeout, **arguments)

    monkeypatch.setattr(Process, "call", unless_hung)
    may_start.clear()
    engine._run(engine._members.lose(last, "it was killed"))
    assert sampled(engine) == 0
    assert other.state == State.READY
    may_start.set()
    until(lambda: not deaf.returning, PATIENCE, "the server to be back")
    assert deaf.client is not hung
    assert "vLLM server 0 did not come back: ServerError: " in caplog.text
    assert "vLLM server 0 is back with the current weights" not in caplog.text


def test_a_server_that_waits_gets_the_weights_where_the_one_that_took_the_publish_is_lost_at_its_end(opened, may_start):
    """The loss comes when the publish has given that one the weights, and is not over."""
    policy = small()
    engine = opened(policy, "shared_memory", in_flight="continue")
    engine.publish(0, PlainBackend(policy).named_weights)
    back, taker = engine._members.all
    may_start.set()
    engine.release()
    restarted(engine, back)
    assert back.state == State.STALE
    engine._weights, engine._released = PlainBackend(policy).named_weights, False
    may_start.clear()
    engine._run(engine._members.lose(taker, "it was killed"))
    assert back.state == State.STALE
    engine._run(engine._members.published())
    assert sampled(engine) == 0
    assert [member.state for member in (back, taker)] == [State.READY, State.STALE]


def test_closing_while_a_returning_server_is_given_the_weights_ends_everything(opened, monkeypatch):
    """The thread that gives them, which Python waits for at its exit, and a request that is open; no server is started
    anew."""
    policy = small()
    engine, weights = opened(policy, "shared_memory"), PlainBackend(policy).named_weights
    engine.publish(0, weights)
    lost, sound = engine._members.all
    call, catch_up, start = Process.call, engine._members._catch_up, Started.start
    giving, given, asked = threading.Event(), threading.Event(), threading.Event()
    starts, failures = [], []

    async def held(process, method, timeout, **arguments):
        if method == "update_weights":
            giving.set()
            await asyncio.Event().wait()
        return await call(process, method, timeout, **arguments)

    async def unanswered(process, *arguments, **more):
        asked.set()
        await asyncio.Event().wait()

    def watched(member):
        try:
            return catch_up(member)
        finally:
            given.set()

    async def counted(started, timeout):
        starts.append(started.name)
        return await start(started, timeout)

    def sample():
        try:
            sampled(engine)
        except BaseException as error:
            failures.append(type(error))

    monkeypatch.setattr(Process, "call", held)
    monkeypatch.setattr(Process, "generate", unanswered)
    monkeypatch.setattr(Started, "start", counted)
    engine._members._catch_up = watched
    sampling = threading.Thread(target=sample)
    sampling.start()
    assert asked.wait(PATIENCE)
    engine._run(engine._members.lose(lost, "it was killed"))
    assert giving.wait(PATIENCE)
    engine.close()
    assert given.wait(PATIENCE)
    sampling.join(PATIENCE)
    assert engine._loop.is_closed()  # so nothing can start a server any more
    assert (starts, failures) == ([lost.name], [asyncio.CancelledError])
    with pytest.raises(TrainingError, match="vllm-server was closed"):
        engine._run(engine._members.lose(sound, "it was killed"))
