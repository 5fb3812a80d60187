"""What the process of an engine does when its pipe ends; vLLM itself is replaced, so that none is needed."""

import os
import subprocess
import sys

import pytest

from process_helpers import until
from rlvr.core.process import parent_death

ENGINE = """
from rlvr.rollout.vllm import engine_process

class Engine:
    facts = {}

    def __init__(self, arguments, pipe):
        self.pipe = pipe

    def serve(self):
        while True:
            self.pipe.recv()
            self.pipe.send("answer")

engine_process.EngineServer = Engine
engine_process.main()
"""
TRAINER = """
import os, socket, sys, time
from multiprocessing.connection import Connection
from pathlib import Path
from rlvr.core.process import child_process

path, scratch, unread = sys.argv[1:]
ours, theirs = socket.socketpair()
end = theirs.fileno()
child_process.start(
    "engine_of_the_test", [str(end)], {"PYTHONPATH": path}, Path(scratch), Path(scratch) / "log", pass_fds=[end]
)
theirs.close()
pipe = Connection(ours.detach())
pipe.send(("start", 0, {}))
pipe.recv()
if unread == "unread":
    pipe.send("question")
    while not pipe.poll(1):
        pass
pipe.close()
time.sleep(0.5)
os._exit(0)
"""
"""The kernel closes what a killed process has open before the process counts as ended; here half a second before."""


@pytest.mark.parametrize("unread", ["all read", "unread"])
def test_the_scratch_folder_goes_though_the_pipe_ends_before_the_trainer(tmp_path, unread):
    """With an answer that the trainer has not read, the pipe ends with a reset connection."""
    (tmp_path / "engine_of_the_test.py").write_text(ENGINE)
    scratch = tmp_path / f"{parent_death.PREFIX}scratch"
    scratch.mkdir()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    trainer = subprocess.run(
        [sys.executable, "-c", TRAINER, path, str(scratch), unread], capture_output=True, timeout=120, check=False
    )
    assert trainer.returncode == 0, trainer.stderr
    until(lambda: not scratch.exists(), 20, "the scratch folder to go")
