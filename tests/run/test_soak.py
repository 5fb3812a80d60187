"""A long run holds no more at its end than near its beginning: memory, threads, files, processes, objects, seconds a
step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

STEPS, EVERY = 3000, 10
TESTS = Path(__file__).resolve().parents[1]

MEMORY = 5 * 2**10
"""Bytes a step by which the run itself may grow beyond the rows of metrics that it keeps on purpose (3.2 kB a step).
3,000 steps gave 3.1 kB: a verdict kept for each new answer (at most 65,536 are), the keys of the rows, and the
allocator's fragments. A step's rollouts, if they leaked, would be 20 kB, a batch's tensors more, and a copy of the
weights 100 kB."""
OBJECTS = 20
"""Containers a step that the garbage collector may count more. 2.6 and 5.0 were measured: the verdict and the key of
each new answer, of which there are 12 a step at most. One leaked rollout is some ten, and a step has 12 of those
too."""
SLOWER = 2.5
"""The ratio of the medians of seconds a step. Other programs on a machine of two cores move it between 0.5 and 2; work
that grows with the steps done so far (15 times as many) would be far above."""


def has_sandbox() -> bool:
    from rlvr.errors import ConfigError
    from rlvr.verifiers import as_verifier

    try:
        as_verifier("code").prepare()
    except ConfigError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_a_run_of_3000_steps_is_flat(tmp_path):
    """Sampling ahead, evaluations, checkpoints, a reference, recorded rollouts, and function and code verifiers."""
    code = has_sandbox()
    command = [sys.executable, str(Path(__file__).with_name("measure_soak.py")), str(tmp_path)]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [*command, str(STEPS), str(EVERY), str(int(code))],
        check=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=3500,
    )
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS // EVERY
    tenth = len(samples) // 10
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]  # the first tenth loads modules and fills caches

    def grown(name: str) -> float:
        return median(row[name] for row in late) - median(row[name] for row in early)

    between = grown("step")
    assert grown("rss") - grown("metrics") < MEMORY * between
    assert grown("objects") < OBJECTS * between
    # Medians of counts: a checkpoint or a program that runs at the moment of a sample adds one or two for a moment.
    for name in ("threads", "os_threads", "files", "children"):
        assert grown(name) <= 0, name
    assert grown("children_rss") < 0.1 * median(row["children_rss"] for row in early)
    assert median(row["seconds"] for row in late) < SLOWER * median(row["seconds"] for row in early)
    if not code:
        pytest.skip("the rest held, but programs could not be run: there is no sandbox here")
