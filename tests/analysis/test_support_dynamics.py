"""Support dynamics: counts and rates from the paper's own tables, and from loops over tasks."""

from __future__ import annotations

import json
import math

import pytest

from rlvr.analysis import main
from rlvr.analysis.analysis_table import read_evaluated
from rlvr.analysis.support_dynamics import SupportCounts, length_of, support_table
from rlvr.errors import DataError
from rlvr.evaluation import TaskResult
from rlvr.records import Verdict

# Rows of tables 1, 3 and 6 of arXiv 2507.14843v4: P, E, S, O, then SRR, NDR, SDS, NSCR as printed.
OF_THE_PAPER = [
    ((2400, 36, 163, 805), (0.936, 0.0148, 0.0291, -0.049)),  # ProRL-1.5B-v1, overall
    ((15, 4, 4, 7), (0.789, 0.211, 0.332, 0.000)),  # AIME24, SFT
    ((138, 12, 34, 88), (0.802, 0.080, 0.145, -0.120)),  # Minerva, DAPO
    ((25, 0, 3, 2), (0.893, 0.000, 0.000, -0.107)),  # AIME2024, ProRL-1.5B-v1
    ((10, 2, 3, 35), (0.769, 0.167, 0.274, -0.067)),  # LiveBench-L
]


@pytest.mark.parametrize(("counts", "rates"), OF_THE_PAPER)
def test_rates_are_those_of_the_paper_s_counts(counts, rates):
    preserved, expanded, shrunk, neither = counts
    got = SupportCounts(preserved, expanded, shrunk, neither)
    for value, printed in zip((got.retention, got.discovery, got.dynamic_score, got.net_change), rates, strict=True):
        # Printed to three or four digits.
        assert value == pytest.approx(printed, abs=6e-4)


def test_a_rate_without_a_task_is_none_and_not_0():
    none = SupportCounts(0, 0, 0, 3)
    assert (none.retention, none.discovery, none.dynamic_score, none.net_change) == (None, None, None, None)
    assert SupportCounts(0, 2, 3, 0).dynamic_score == 0.0


def results(path, correct, samples=4, **more):
    """A written evaluation of tasks t0, t1 ... with these numbers of right samples."""
    rows = [
        TaskResult(
            f"t{n}", "even" if n % 2 == 0 else "odd", None, samples, c, c / samples, responses=samples, tokens=10 * n
        ).to_json()
        for n, c in enumerate(correct)
    ]
    path.write_text(json.dumps({"k": [1, samples], **more, "by_task": rows}))
    return path


def test_counts_by_source_are_those_of_a_loop_over_tasks(tmp_path):
    base, tuned = [0, 3, 1, 0, 4, 0], [1, 0, 4, 0, 4, 2]
    before = read_evaluated(results(tmp_path / "base.json", base))
    after = read_evaluated(results(tmp_path / "tuned.json", tuned))
    table = support_table(before, [after], [1, 2])
    rows = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == ["all", "even", "odd"]
    for part, members in (("all", range(6)), ("even", (0, 2, 4)), ("odd", (1, 3, 5))):
        seen = {"P": 0, "E": 0, "S": 0, "O": 0}
        for n in members:
            seen["P" if base[n] and tuned[n] else "E" if tuned[n] else "S" if base[n] else "O"] += 1
        assert {name: rows[part][name] for name in seen} == seen
        assert rows[part]["pass@1 tuned"] == pytest.approx(sum(tuned[n] / 4 for n in members) / len(members))
        # One of two drawn without replacement from four is right: 1 - C(4 - c, 2) / C(4, 2).
        pairs = [1 - math.comb(4 - base[n], 2) / 6 for n in members]
        assert rows[part]["pass@2 base"] == pytest.approx(sum(pairs) / len(members))
    # 3 / samples is the rule of three of -ln(0.05) / samples.
    assert "below 0.75" in table.notes[-1]


def test_a_greedy_response_does_not_make_a_task_supported(tmp_path):
    base = results(tmp_path / "base.json", [0])
    rows = json.loads(base.read_text())
    rows["by_task"][0]["greedy"] = 1.0
    base.write_text(json.dumps(rows))
    table = support_table(read_evaluated(base), [read_evaluated(results(tmp_path / "tuned.json", [0]))])
    assert table.rows[0][table.columns.index("O")] == 1


def test_a_greedy_response_does_not_count_in_the_length(make_rollout):
    """Three samples of 2, 4 and 6 tokens and a greedy response of 30."""

    def response(length):
        rollout = make_rollout([1] * (1 + length), prompt=1)
        rollout.verdicts["v"] = Verdict.from_score(1.0)
        return rollout

    result = TaskResult("t0")
    result.add_greedy([response(30)])
    result.add_samples([response(length) for length in (2, 4, 6)], [1])
    written = TaskResult.from_json(json.loads(json.dumps(result.to_json())))
    assert (written.tokens, written.responses) == (42, 4)
    assert length_of([written]) == 4
    greedy_alone = TaskResult("t1")
    greedy_alone.add_greedy([response(30)])
    assert length_of([greedy_alone, written]) == 4
    assert length_of([greedy_alone]) is None


def test_unequal_samples_are_said_and_too_large_a_k_is_refused(tmp_path):
    before = read_evaluated(results(tmp_path / "base.json", [1, 2]))
    after = read_evaluated(results(tmp_path / "tuned.json", [1, 2], samples=8))
    assert any("fewest samples of a task are 4, 8" in note for note in support_table(before, [after]).notes)
    with pytest.raises(DataError, match="pass@8 cannot be estimated: a task has 4"):
        support_table(before, [after], [8])


def test_the_command_prints_markdown_and_json_and_names_bad_input(tmp_path, capsys):
    base, tuned = (str(results(tmp_path / f"{name}.json", [1, 0])) for name in ("base", "tuned"))
    assert main(["support", base, tuned, "--k", "1,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| tuned | tasks of | tasks | pass@1 base | pass@1 tuned | pass@4 base |")
    assert lines[2].startswith("| tuned | all | 2 | 0.125 | 0.125 | 0.5 | 0.5 | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 1 |")
    assert main(["support", base, tuned, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["SRR"] == 1.0
    for arguments, message in (
        (["support", base, str(tmp_path / "none.json")], "cannot be read"),
        (["support", base, tuned, "--k", "0"], "--k is a list of numbers from 1 on"),
        (["ability", "base=x.json"], "is not written MODEL/CONDITION=RESULT"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
