"""Where a verifier hangs or crashes is told once, with the stack of its worker; verdicts stay as they are."""

import logging
import os
import signal

import pytest
from hostile_verifiers import InProcess

from rlvr.records import Task, VerdictStatus
from rlvr.verifiers import VerifierPool, as_verifier

TASK = Task("t", "?")


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "stacks" in r.getMessage()]


def test_the_first_answer_that_is_late_is_told_with_its_stack(caplog):
    with VerifierPool(workers=1) as pool:
        verifier = InProcess(time_limit=0.5)
        verdicts = pool.verify_many(verifier, [(TASK, answer) for answer in ["good", "sleep", "hang"]])
    assert [(v.status, v.score, v.traceback) for v in verdicts[1:]] == [(VerdictStatus.TIMEOUT, 0.0, "")] * 2
    (warning,) = warnings_of(caplog)
    assert "gave no verdict within its time limit" in warning
    assert 'hostile_verifiers.py", line' in warning and "in verify" in warning


def test_an_answer_that_crashes_its_worker_is_told_with_its_stack(caplog):
    with VerifierPool(workers=1) as pool:
        (verdict,) = pool.verify_many(InProcess(), [(TASK, f"die:{signal.SIGSEGV}")])
    assert (verdict.status, verdict.score, verdict.traceback) == (VerdictStatus.ERROR, 0.0, "")
    (warning,) = warnings_of(caplog)
    assert "crashed" in warning and "Segmentation fault" in warning and "in verify" in warning


@pytest.mark.parametrize(
    ("line", "reason"),
    [("time.sleep(1000)", "did not load within"), ("os.kill(os.getpid(), 11)", "ended with code -11")],
)
def test_a_verifier_that_is_not_loaded_says_where(tmp_path, monkeypatch, line, reason):
    monkeypatch.setattr("rlvr.verifiers.pool.worker_process.START_SECONDS", 3.0)
    (tmp_path / "bad.py").write_text(
        "import os, time\nfrom rlvr.verifiers import Needs, Verifier\n\ndef loads_for_ever():\n"
        f"    if os.getpid() != {os.getpid()}:\n        {line}\n\nloads_for_ever()\n\n"
        "class Bad(Verifier):\n    needs = Needs(process=True)\n    def verify(self, task, completion):\n"
        "        return 1.0\n"
    )
    with VerifierPool(workers=1) as pool:
        (verdict,) = pool.verify_many(as_verifier(f"{tmp_path / 'bad.py'}:Bad"), [(TASK, "x")])
    assert verdict.score is None and reason in verdict.reason
    assert reason in verdict.traceback.splitlines()[-1]
    assert f'{tmp_path / "bad.py"}", line 6 in loads_for_ever' in verdict.traceback
