"""A runner elsewhere: a service that speaks SandboxFusion's HTTP API (`POST /run_code`).

Source: https://bytedance.github.io/SandboxFusion. How well programs are isolated there is the service's affair. A call
is made by a program around the model's, which prints typed JSON after a marker of that run; like every result it is a
claim.

Invariant: what the service fails to do (no answer, an error of its own, nonsense) is `Ended.BROKEN`, never the
program's fault.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from types import ModuleType
from typing import Any

from rlvr.core.daemon_calls import DaemonThreads
from rlvr.errors import ConfigError, nearest
from rlvr.verifiers.code import values
from rlvr.verifiers.code.runner import DECODED_SIZE, Ended, Job, Outcome
from rlvr.verifiers.code.sandbox.inside import nodes, sealing

WORKERS = 32
"""Requests at once, where nothing else is asked for."""
COMPILE_SECONDS = 20.0
# A service has a queue of its own; arbitrary.
_QUEUE_SECONDS = 60.0
"""Seconds that a program may wait at a service beyond its own limits."""
_LANGUAGES = {"python": "python", "cpp": "cpp", "javascript": "nodejs"}
# As in the local runner: one failure may be chance (a restarted service). Each attempt may cost the whole wait.
_ATTEMPTS = 2

# Runs at the service, where no module of this package is: the two that are needed go along as texts. `print` of the
# marker begins a new line, whatever the program printed before.
_AROUND = """
import sys, types
values = types.ModuleType("values")
exec({values!r}, values.__dict__)
nodes = types.ModuleType("nodes")
exec({nodes!r}, nodes.__dict__)
program = sys.modules["program"] = types.ModuleType("program")
exec(compile({source!r}, "program.py", "exec"), program.__dict__)
{seal}
name, args, kwargs = values.decode({call!r})
if "(" in name:
    result = eval(name, program.__dict__)
else:
    first, *rest = name.split(".")
    function = getattr(program, first)
    for part in rest:
        function = getattr(function(), part)
    made = lambda one: eval(one.text, program.__dict__) if type(one) is values.Source else one
    args, kwargs = [made(one) for one in args], dict((key, made(one)) for key, one in kwargs.items())
    result = nodes.with_nodes(function, program.__dict__, {argument!r})(*args, **kwargs)
print("\\n" + {marker!r} + values.encode(result).hex(), flush=True)
"""


_SEALED = """
import types
sealing = types.ModuleType("sealing")
exec({sealing!r}, sealing.__dict__)
"""
_SEALED_SCRIPT = """
code = compile({source!r}, "program.py", "exec")
sealing.seal("program.py")
exec(code, {{"__name__": "__main__"}})
"""


CLOSED = "it was closed"
"""Said of a job that comes after the end."""


class RemoteRunner:
    """Runs jobs at a service. It runs no tests with a proxied candidate: their outcome is `Ended.BROKEN`."""

    tier = "remote"

    def __init__(self, address: str, workers: int | None = None) -> None:
        self._address = address.rstrip("/") + "/run_code"
        self._requests = DaemonThreads(workers or WORKERS, "rlvr-remote-sandbox")
        self._closed = False

    async def run(self, job: Job) -> Outcome:
        """See Runner. ConfigError for a language that the service does not know, or a call in another than Python."""
        if job.language not in _LANGUAGES:
            raise ConfigError(f"programs in {job.language!r} cannot be run remotely{nearest(job.language, _LANGUAGES)}")
        if job.call is not None and job.language != "python":
            raise ConfigError(f"functions are called in python only, not in {job.language}")
        # New for each run, so that the program cannot print a value itself before its function returned. It can read it
        # from its own frames, like every claim.
        marker = secrets.token_hex(16) if job.call else ""
        body = {
            "code": _code(job, marker),
            "language": _LANGUAGES[job.language],
            "stdin": job.stdin.decode("utf-8", "replace"),
            "compile_timeout": COMPILE_SECONDS,
            "run_timeout": job.limits.seconds,
            "memory_limit_MB": job.limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        reply: Outcome | str = ""
        for _ in range(_ATTEMPTS):
            if self._closed:
                break
            # A service that does not answer keeps its thread until the request's own deadline, whoever gave it up.
            reply = await asyncio.wrap_future(self._requests.submit(lambda: self._post(body, job, marker)))
            if isinstance(reply, Outcome):
                return reply
        return Outcome(Ended.BROKEN, reason=f"the remote sandbox: {reply or CLOSED}")

    async def test(self, job: Job, candidate: Job, name: str, token: str) -> Outcome:
        """Not possible over this API."""
        return Outcome(
            Ended.BROKEN, reason="a remote sandbox cannot run a test apart from its candidate; use a local one"
        )

    async def close(self) -> None:
        """Make no request from now on; those under way end by themselves."""
        self._closed = True
        self._requests.close()

    def _post(self, body: dict[str, Any], job: Job, marker: str) -> Outcome | str:
        """The outcome of a run, read here and not on the event loop, since a reply has megabytes; or what is wrong with
        the service, in words."""
        if self._closed:
            return CLOSED
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
        deadline = job.limits.seconds + COMPILE_SECONDS + _QUEUE_SECONDS
        # JSON writes two to three bytes of most texts as six, and a value comes as hexadecimal digits.
        most = 4 * job.limits.output_bytes + (2 * values.MAX_SIZE if job.call else 0) + 2**16
        try:
            with urllib.request.urlopen(request, timeout=deadline) as response:
                data = response.read(most + 1)
            if len(data) > most:
                return Outcome(Ended.OUTPUT, reason=f"it wrote more than {job.limits.output_bytes} bytes")
            reply = json.loads(data)
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            return str(error) or type(error).__name__
        # "SandboxError" is the API's third status; only the other two say something of the program.
        if not isinstance(reply, dict) or reply.get("status") not in ("Success", "Failed"):
            return str(reply.get("message") or reply.get("status") if isinstance(reply, dict) else "no object")[:1000]
        return _outcome(reply, job, marker)


def _code(job: Job, marker: str) -> str:
    """Return the code that the service runs: the source, or a program around it that makes the call or seals it."""
    if job.sealed:
        seal = _SEALED.format(sealing=_text_of(sealing))
    else:
        seal = ""
    if job.call is None:
        if job.sealed:
            return seal + _SEALED_SCRIPT.format(source=job.source)
        return job.source
    seal = f"{seal}sealing.seal('program.py')" if seal else ""
    modules = {"values": _text_of(values), "nodes": _text_of(nodes)}
    return _AROUND.format(
        **modules, source=job.source, call=job.call.message(), argument=job.call.argument, marker=marker, seal=seal
    )


def _text_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _outcome(reply: dict[str, Any], job: Job, marker: str) -> Outcome:
    compiled = _part(reply, "compile_result")
    ran = _part(reply, "run_result")
    # Without a `run_result` the compiler refused the program.
    if not ran and compiled:
        messages = str(compiled.get("stderr") or "")
        return Outcome(
            Ended.RAISED, stderr=messages.encode(errors="replace"), reason=f"it does not compile: {messages[:300]}"
        )
    status = ran.get("status")
    code = ran.get("return_code")
    out, err = (str(ran.get(name) or "").encode("utf-8", "surrogatepass") for name in ("stdout", "stderr"))
    took = ran.get("execution_time")
    if isinstance(took, (int, float)) and 0 <= took < 1e9:
        seconds = float(took)
    else:
        seconds = 0.0
    typed = b""
    if marker:
        out, _, typed = out.partition(b"\n" + marker.encode())
    most = job.limits.output_bytes
    if status == "TimeLimitExceeded":
        return Outcome(
            Ended.TIME, out[:most], err[:most], None, f"it took longer than {job.limits.seconds:g} s", seconds
        )
    if status not in ("Finished", "Error"):
        return Outcome(Ended.BROKEN, reason=f"the remote sandbox gives the run the status {status!r}")
    # The API has no option for a limit of output, so it is kept here, after the fact.
    if max(len(out), len(err)) > most:
        return Outcome(Ended.OUTPUT, out[:most], err[:most], None, f"it wrote more than {most} bytes", seconds)
    if code != 0:
        last = (err.decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1][:1000]
        ended = Ended.RAISED
        if isinstance(code, int) and code < 0:
            ended = Ended.CRASHED
        elif last.startswith("MemoryError"):
            ended = Ended.MEMORY
        return Outcome(ended, out, err, None, last, seconds)
    if not marker:
        return Outcome(Ended.DONE, out, err, None, "", seconds)
    try:
        claim = bytes.fromhex(typed.split(b"\n", 1)[0].decode())
        if not claim:
            return Outcome(Ended.RAISED, out, err, None, "it ended without an answer", seconds)
        value, size = values.measured(claim, DECODED_SIZE)
    except ValueError as error:
        return Outcome(Ended.RAISED, out, err, None, f"it ended without an answer ({error})", seconds)
    return Outcome(Ended.DONE, out, err, value, "", seconds, claim, size)


def _part(reply: dict[str, Any], name: str) -> dict[str, Any]:
    part = reply.get(name)
    return part if isinstance(part, dict) else {}
