"""scripts/train.slurm as Slurm runs it, with Slurm's commands replaced: what torchrun is told."""

import re
import subprocess
from pathlib import Path

from torch.distributed.run import get_args_parser

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.slurm"
TORCHRUN_DEFAULT = 30
"""Seconds between SIGTERM and SIGKILL of the ranks where torchrun is told nothing."""


def started_with(tmp_path, *arguments, **settings):
    """The command that the script hands to srun."""
    for name, prints in {"srun": 'printf "%s\\n" "$@"', "scontrol": "printf 'node7\\nnode8\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{prints}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "node[7-8]", "JOB_ID": "40001", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "4"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin", **settings}
    command = ["bash", str(SCRIPT), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return run.stdout.splitlines()


def test_the_ranks_of_a_slurm_job_have_the_time_to_save(tmp_path):
    """Slurm's signal comes some time before the job's end; torchrun kills the ranks before that is over, and not much
    earlier."""
    told = started_with(tmp_path, "--config", "a.yaml", "run.name=a b")
    place = told.index(".venv/bin/torchrun")
    parsed = get_args_parser().parse_args(told[place + 1 :])
    notice = int(re.search(r"^#SBATCH --signal=TERM@(\d+)$", SCRIPT.read_text(), re.MULTILINE)[1])
    assert 2 * TORCHRUN_DEFAULT < parsed.shutdown_timeout < notice
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == ("2", "4", "node7:20001")
    assert (parsed.module, parsed.training_script) == (True, "rlvr.train")
    assert parsed.training_script_args == [
        "run.overwrite=true",
        "--config",
        "a.yaml",
        "run.name=a b",
        "--resume",
        "auto",
    ]


def test_torchrun_may_be_that_of_a_container(tmp_path):
    told = started_with(tmp_path, "--config", "a.yaml", TORCHRUN="apptainer exec --nv rlvr.sif torchrun")
    assert told[1:7] == ["apptainer", "exec", "--nv", "rlvr.sif", "torchrun", "--nnodes"]
