"""Rehearsals of a zygote: nothing of them is left in it, and what its forks run is warm."""

import json
import subprocess
import sys

import pytest

LEFT = """
import json, linecache, os, resource, signal, sys, threading
from rlvr.verifiers.code.sandbox.inside import warm

def state():
    limits = [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
    with open("/proc/self/status") as file:
        seccomp = [line for line in file if line.startswith("Seccomp:")]
    try:
        child = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        child = None
    return {"descriptors": sorted(os.listdir("/proc/self/fd")), "modules": sorted(sys.modules), "limits": limits,
            "status": seccomp, "child": child, "lines": sorted(linecache.cache), "stdout": sys.stdout is sys.__stdout__,
            "folder": os.getcwd(), "session": os.getsid(0), "signal": str(signal.getsignal(signal.SIGCHLD)),
            "main": threading.main_thread().is_alive()}

warm.warm()
before = state()
warm.rehearse()
print(json.dumps([before, state()]))
"""


def test_a_rehearsal_leaves_nothing():
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, after = json.loads(done.stdout)  # nothing but this was printed
    assert after == before


COUNTED = """
import linecache, sys
from rlvr.verifiers.code.sandbox.inside import frames, kernel, warm

warm.warm()
if sys.argv[1] == "warm":
    warm.rehearse()
opcodes = [op.opname for op in __import__("dis").get_instructions(frames._exactly, adaptive=True)]
print("LOAD_GLOBAL" in opcodes, kernel.libc.__dict__.get("prctl") is not None)
"""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the names of specialised instructions")
@pytest.mark.parametrize(("how", "said"), [("cold", "True False"), ("warm", "False True")])
def test_what_forks_run_is_specialised(how, said):
    done = subprocess.run([sys.executable, "-c", COUNTED, how], capture_output=True, timeout=120, text=True)
    assert done.stdout.strip() == said, done.stderr
