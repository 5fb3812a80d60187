"""The sandbox: what a verifier in one can and cannot do. Skipped, in words, where bubblewrap is not installed."""

import os
import shutil
import textwrap

import pytest

from rlvr.errors import ConfigError
from rlvr.records import Task
from rlvr.verifiers import VerifierPool, as_verifier
from rlvr.verifiers.pool import Verification

TASK = Task("t1", "2+2?", "4")

PROBE = """
import os, socket, time
from rlvr.records import Verdict
from rlvr.verifiers import Needs, Verifier

class Probe(Verifier):
    needs = Needs(process=True, sandbox=True)
    time_limit = 5.0

    def verify(self, task, completion):
        if completion == "hang":
            while True:
                pass
        return Verdict.from_score(1, answer=repr(eval(completion)))
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    file = tmp_path_factory.mktemp("probe") / "probe.py"
    file.write_text(textwrap.dedent(PROBE))
    (file.parent / "secret.txt").write_text("secret")
    return as_verifier(f"{file}:Probe"), file.parent / "secret.txt"


def test_where_there_is_no_bubblewrap_the_check_names_the_package(probe, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with VerifierPool() as pool, pytest.raises(ConfigError, match="bubblewrap"):
        Verification(probe[0], pool).check([TASK])


@pytest.mark.gate
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_sandboxed_verifier_sees_and_touches_nothing(probe):
    verifier, secret = probe

    def does(expression):
        verdict = pool.verify_many(verifier, [(TASK, expression)])[0]
        return verdict.reason if verdict.score is None else verdict.answer

    with VerifierPool(workers=2) as pool:
        assert does("1 + 1") == "2"
        assert "FileNotFoundError" in does(f"open({str(secret)!r}).read()")
        assert "FileNotFoundError" in does("open('/etc/passwd').read()")
        for folder in ("", "/usr", "/etc"):
            assert "OSError: [Errno 30]" in does(f"open('{folder}/new', 'w')")
        does(f"open({str(secret.parent / 'new')!r}, 'w').write('x')")  # at most in its own /tmp
        assert not (secret.parent / "new").exists()
        assert "No space left" in does("open('/tmp/big', 'wb').write(bytes(2**27))")
        assert does("len(open('/proc/net/dev').read().splitlines())") == "3"  # two lines of heading, and loopback
        assert "OSError" in does("socket.create_connection(('1.1.1.1', 53), 1)")
        assert does("[name for name in os.environ if name in ('PATH', 'HOME', 'USER')]") == "[]"
        assert "ProcessLookupError" in does(f"os.kill({os.getpid()}, 0)")
        late = pool.verify_many(verifier, [(TASK, "hang")])[0]
        assert (late.status, late.score) == ("timeout", 0)
        assert does("1 + 1") == "2"
