"""The remote runner, against a stand-in on the loopback that speaks SandboxFusion's API and runs what it is sent."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlvr.errors import ConfigError
from rlvr.verifiers.code.preludes import IMPORTS, NODES
from rlvr.verifiers.code.runner import Call, Ended, Job, Limits
from rlvr.verifiers.code.sandbox import open_runner, remote
from rlvr.verifiers.code.values import Source


class StandIn(BaseHTTPRequestHandler):
    """Runs Python for real; `mode` of the server makes it fail in the ways of a service."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        mode = self.server.modes.pop(0) if self.server.modes else "run"
        reply = {"run": self.ran, "compile": self.compile_error, "own": self.own_error}.get(mode, lambda body: mode)(
            body
        )
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(500 if mode == "down" else 200)
        if mode == "cut":
            self.send_header("Content-Length", str(len(data) + 1))
        self.end_headers()
        # A client that gave up, or that refuses a long reply, has closed its end.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)

    def ran(self, body):
        command = [sys.executable, "-I", "-c", body["code"]]
        try:
            done = subprocess.run(
                command, input=body["stdin"].encode(), capture_output=True, timeout=body["run_timeout"]
            )
        except subprocess.TimeoutExpired:
            return {
                "status": "Failed",
                "run_result": {"status": "TimeLimitExceeded", "execution_time": body["run_timeout"]},
            }
        out = {"stdout": done.stdout.decode("utf-8", "replace"), "stderr": done.stderr.decode("utf-8", "replace")}
        run = {"status": "Finished", "execution_time": 0.1, "return_code": done.returncode, **out}
        return {
            "status": "Failed" if done.returncode else "Success",
            "compile_result": None,
            "run_result": run,
            "files": {},
        }

    def compile_error(self, body):
        failed = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "x.cpp:1: error: no"}
        return {"status": "Failed", "compile_result": failed, "run_result": None}

    def own_error(self, body):
        return {"status": "SandboxError", "message": "no container left", "run_result": None}

    def log_message(self, *args):
        pass


@pytest.fixture
def service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.asked, server.modes = [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def run(service, job):
    async def scene():
        runner = open_runner(f"http://127.0.0.1:{service.server_port}/")
        try:
            return await runner.run(job)
        finally:
            await runner.close()

    return asyncio.run(scene())


def test_a_script(service):
    outcome = run(service, Job("print(int(input()) * 2)", stdin=b"4", limits=Limits(seconds=20, memory_mb=99)))
    assert (outcome.ended, outcome.stdout) == (Ended.DONE, b"8\n")
    ((path, body),) = service.asked
    assert path == "/run_code"
    assert {"language": "python", "run_timeout": 20, "memory_limit_MB": 99}.items() <= body.items()


def test_a_call_comes_back_typed_whatever_the_program_prints(service):
    source = "class Solution:\n    def f(self, a, b):\n        print('x', end='')\n        return {a: (b, 1.5)}"
    outcome = run(service, Job(source, call=Call("Solution.f", (2**80,), {"b": b"\xff"}), limits=Limits(seconds=20)))
    assert (outcome.ended, outcome.value, outcome.stdout) == (Ended.DONE, {2**80: (b"\xff", 1.5)}, b"x")


def test_a_reply_is_read_off_the_event_loop(service, monkeypatch):
    """A value of megabytes takes tens of milliseconds, in which the loop would stand still."""
    threads = []
    read = remote._outcome
    monkeypatch.setattr(remote, "_outcome", lambda *args: threads.append(threading.current_thread()) or read(*args))
    job = Job("def f(): return 'x' * 3 * 10**6", call=Call("f"), limits=Limits(seconds=20))
    assert len(run(service, job).claim) > 2 * 10**6
    assert threads and threading.current_thread() not in threads


def test_calls_of_functions_with_nodes_with_functions_and_of_what_they_return(service):
    limits = Limits(seconds=20)
    nodes = f"{IMPORTS}{NODES}def f(head: Optional[ListNode]) -> Optional[ListNode]:\n    return head.next"
    assert run(service, Job(nodes, call=Call("f", ([1, 2, 3],)), limits=limits)).value == [2, 3]
    given = Job(
        "def f(g, xs): return list(map(g, xs))", call=Call("f", (Source("lambda x: -x"), [1, 2])), limits=limits
    )
    assert run(service, given).value == [-1, -2]
    assert run(service, Job("def f(x): return lambda y: x + y", call=Call("f(3)(4)"), limits=limits)).value == 7


@pytest.mark.parametrize(
    ("source", "call", "ended"),
    [
        ("1/0", None, Ended.RAISED),
        ("raise MemoryError", None, Ended.MEMORY),
        ("import os; os.abort()", None, Ended.CRASHED),
        ("print('x' * 2 * 10**6)", None, Ended.OUTPUT),
        ("print('x' * 45 * 10**6)", None, Ended.OUTPUT),
        ("print('\\1' * 45 * 10**6)\ndef f(): return 1", Call("f"), Ended.OUTPUT),
        ("while True: pass", None, Ended.TIME),
        ("import os; print('v[1]'); os._exit(0)", Call("f"), Ended.RAISED),
        ("def f(): return object()", Call("f"), Ended.RAISED),
        ("def f(): return lambda: 1", Call("f"), Ended.RAISED),
    ],
)
def test_how_it_ends(service, source, call, ended):
    outcome = run(service, Job(source, call=call, limits=Limits(seconds=2 if ended is Ended.TIME else 20)))
    assert outcome.ended is ended
    assert outcome.value is None


def test_an_object_with_a_rigged_comparison_arrives_by_what_it_holds(service):
    source = "def f(): return type('R', (int,), {'__eq__': lambda *a: True})(1)"
    outcome = run(service, Job(source, call=Call("f"), limits=Limits(seconds=20)))
    assert (type(outcome.value), outcome.value) == (int, 1)


def test_a_program_that_does_not_compile_is_at_fault(service):
    service.modes = ["compile"]
    outcome = run(service, Job("int main(){", "cpp"))
    assert (outcome.ended, outcome.reason) == (Ended.RAISED, "it does not compile: x.cpp:1: error: no")


@pytest.mark.parametrize("mode", ["own", "down", "cut", "nonsense", "[]", "{}", '{"status":"Success"}', "[" * 9999])
def test_a_service_that_fails_is_asked_twice_and_leaves_the_run_undecided(service, mode):
    service.modes = [mode, mode]
    assert run(service, Job("print(1)")).ended is Ended.BROKEN
    service.modes = [mode]
    recovered = run(service, Job("print(1)", limits=Limits(seconds=20))).ended
    assert recovered is (Ended.BROKEN if mode == '{"status":"Success"}' else Ended.DONE)


def test_nobody_there_and_what_it_cannot_do(service):
    with pytest.raises(ConfigError, match="cannot be run remotely"):
        run(service, Job("", "cobol"))
    with pytest.raises(ConfigError, match="in python only"):
        run(service, Job("", "cpp", call=Call("f")))
    service.server_close()
    assert run(service, Job("print(1)")).ended is Ended.BROKEN


def test_a_time_that_is_no_number_is_no_error_of_ours(service):
    ran = {"status": "Finished", "return_code": 0, "stdout": "1\n", "execution_time": "soon"}
    service.modes = [json.dumps({"status": "Success", "run_result": ran})]
    outcome = run(service, Job("print(1)"))
    assert (outcome.ended, outcome.seconds) == (Ended.DONE, 0.0)
