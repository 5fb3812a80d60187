"""The committed results of the benchmarks of speed belong to the benchmarks as they are now. Their seconds are not
checked."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import asdict

import pytest


@pytest.fixture
def benchmarks(root, monkeypatch):
    """A function that imports a script of scripts/benchmarks."""
    monkeypatch.syspath_prepend(root / "scripts/benchmarks")
    return __import__


def committed(root, name: str) -> dict:
    return json.loads((root / f"scripts/benchmarks/{name}.json").read_text())


def pinned(root, package: str) -> str:
    (results,) = re.findall(rf"^{package}==(\S+)$", (root / "scripts/constraints.txt").read_text(), re.MULTILINE)
    return results


def test_the_side_by_side_results_are_of_the_workloads_as_they_are(root, benchmarks):
    speed, result = benchmarks("speed"), committed(root, "speed")
    assert result["format"] == speed.FORMAT and result["rounds"] >= 5
    assert result["command"].startswith("python scripts/benchmarks/speed.py --trl-python PYTHON --rounds")
    assert {n: w["settings"] for n, w in result["workloads"].items()} == {
        name: asdict(workload) for name, workload in speed.WORKLOADS.items()
    }
    assert result["versions"]["trl"] == "1.16.0"
    for package in ("torch", "transformers"):
        assert result["versions"][package].split("+")[0] == pinned(root, package)
    for results in result["workloads"].values():
        ours, trl = results["rounds"]["ours"], results["rounds"]["trl"]
        assert len(ours) == len(trl) == result["rounds"]
        assert results["ratio"] == statistics.median(
            theirs["step_seconds"] / mine["step_seconds"] for mine, theirs in zip(ours, trl, strict=True)
        )
    assert (root / "scripts/benchmarks/speed.md").read_text() == speed.table(result)


def test_the_growth_results_are_of_the_sizes_as_they_are(root, benchmarks):
    growth, result = benchmarks("growth"), committed(root, "growth")
    assert result["format"] == growth.FORMAT and result["base"] == asdict(growth.BASE)
    assert result["command"].startswith("python scripts/benchmarks/growth.py --rounds")
    for axis, workloads in growth.sizes().items():
        assert len(result["axes"][axis]) == len(workloads)
    assert (root / "scripts/benchmarks/growth.md").read_text() == growth.table(result)


def test_the_results_of_the_fused_head_are_of_its_shapes(root, benchmarks):
    script, result = benchmarks("fused_head"), committed(root, "fused_head")
    assert result["command"] == "python scripts/benchmarks/fused_head.py --output scripts/benchmarks/fused_head.json"
    assert {n: tuple(shape[k] for k in "TVH") for n, shape in result["shapes"].items()} == script.SHAPES
    assert {way for times in result["cpu seconds"].values() for way in times} == set(script.WAYS)
    peaks = {(row["way"], row["T"], row["V"], row["H"]): row["MiB"] for row in result["peak MiB"]}
    assert [key[1:] for key in peaks if key[0] == "fused"] == script.MEMORY
    assert result["versions"]["torch"].split("+")[0] == pinned(root, "torch")


def test_the_table_has_each_workload_with_the_median_of_its_rounds_ratios(benchmarks):
    speed = benchmarks("speed")

    def run(seconds: float) -> dict:
        phases = {"rollout": seconds / 2, "verify": 0.0, "update": seconds / 2}
        return {"step_seconds": seconds, "tokens_per_step": 100.0, "peak_mib": 500.0, "phase_seconds": phases}

    results = {
        "settings": asdict(speed.WORKLOADS["W1"]),
        "rounds": {"ours": [run(0.1), run(0.2), run(0.1)], "trl": [run(0.2), run(0.2), run(0.4)]},
    }
    result = {"rounds": 3, "command": "c", "machine": "m", "versions": {"torch": "2"}, "workloads": {"W1": results}}
    row = next(line for line in speed.table(result).splitlines() if line.startswith("| W1: "))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["0.1000", "0.2000", "2.00"]
    assert speed.ratio({"rounds": {"ours": [run(0.1)]}}) is None
