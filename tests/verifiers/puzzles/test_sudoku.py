import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.records import Task, VerdictStatus
from rlvr.verifiers.puzzles.sudoku import SudokuVerifier

# The example of en.wikipedia.org/wiki/Sudoku
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
ROWS = [SOLUTION[i : i + 9] for i in range(0, 81, 9)]
SMALL = [[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def judge(answer, puzzle=PUZZLE, **info):
    return SudokuVerifier().quick(Task("t", PUZZLE, info={"puzzle": puzzle, **info}), f"<answer>{answer}</answer>")


@pytest.mark.parametrize(
    "answer",
    [
        SOLUTION, "\n".join(ROWS), "\n".join(" ".join(row) for row in ROWS), "\n".join("|".join(row) for row in ROWS), json.dumps([[int(c) for c in row] for row in ROWS]),
        "\n".join(f"| {row[:3]} | {row[3:6]} | {row[6:]} "
                  "|" for row in ROWS), "```\n" + "\n".join(ROWS) + "\n```", "---\n" + "\n-----+-----\n".join(ROWS), str([[int(c) for c in row] for row in ROWS]),
        "\n".join(",".join(row) for row in ROWS),
    ],
)  # fmt: skip
def test_the_solution_in_any_layout(answer):
    assert (judge(answer).status, judge(answer).score) == (VerdictStatus.CORRECT, 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        "", PUZZLE, SOLUTION[:-1], SOLUTION + "1", SOLUTION * 2, SOLUTION[:-1] + "1", SOLUTION[9:] + SOLUTION[:9], "\n".join([ROWS[1], ROWS[0], *ROWS[2:]]), "123456789" * 9,
        "\n".join(ROWS) + "\nor\n" + "\n".join(ROWS), "[[1]]", "[[true]]", "[" * 1000, "[1, 2]", "NaN", "null", "\n".join("ABCDEFGHI"), SOLUTION.replace("1", "0"), SOLUTION.replace("5", "\u0665"),
    ],
)  # fmt: skip
def test_what_is_no_solution(answer):
    assert judge(answer).score == 0.0


def test_given_cells_count_and_not_only_the_rules():
    relabelled = SOLUTION.translate(str.maketrans("123456789", "234567891"))
    assert judge(relabelled, "." * 81).score == 1
    assert "given" in judge(relabelled).reason


def test_other_sizes_and_latin_squares():
    assert judge("1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1", SMALL).score == 1
    assert judge("1 2 3 4\n4 3 1 2\n2 1 4 3\n3 4 2 1", SMALL).score == 1
    latin = "1 2 3 4\n2 3 4 1\n3 4 1 2\n4 1 2 3"
    blank = [[None] * 4] * 4
    assert judge(latin, blank).score == 0
    assert judge(latin, blank, box=None).score == judge(latin, blank, box=[1, 4]).score == 1
    six = [[(3 * (r % 2) + r // 2 + c) % 6 + 1 for c in range(6)] for r in range(6)]
    assert judge(json.dumps(six), [[0] * 6] * 6).score == 1
    assert judge(json.dumps(six), [[0] * 6] * 6, box=[3, 2]).score == 0
    sixteen = [[(4 * (r % 4) + r // 4 + c) % 16 + 1 for c in range(16)] for r in range(16)]
    assert judge("\n".join(" ".join(map(str, row)) for row in sixteen), [[0] * 16] * 16).score == 1
    assert judge("\n".join("".join(map(str, row)) for row in sixteen), [[0] * 16] * 16).score == 0


@pytest.mark.parametrize(
    ("puzzle", "info"),
    [
        (None, {}),
        ("", {}),
        ([[1]], {}),
        ([[1, 2], [1]], {}),
        ([[5, 0], [0, 0]], {}),
        ("11" + "." * 79, {}),
        (SMALL, {"box": [3, 2]}),
        (SMALL, {"box": "x"}),
        ([1, 2], {}),
        ([["a", 0], [0, 0]], {}),
        pytest.param([[10**5000, 0], [0, 0]], {}, id="huge"),
    ],
)
def test_bad_tasks_are_found(puzzle, info):
    task = Task("t", "p", info={"puzzle": puzzle, **info})
    assert SudokuVerifier().check_task(task)
    assert SudokuVerifier().quick(task, SOLUTION).score is None


@settings(deadline=None)
@given(
    st.permutations("123456789"),
    st.permutations(range(3)),
    st.booleans(),
    st.integers(0, 80),
    st.sampled_from("123456789"),
)
def test_symmetries_keep_a_solution_and_a_changed_cell_does_not(symbols, bands, transposed, cell, symbol):
    grid = [
        ROWS[3 * band + row].translate(str.maketrans("123456789", "".join(symbols)))
        for band in bands
        for row in range(3)
    ]
    grid = ["".join(column) for column in zip(*grid, strict=True)] if transposed else grid
    text = "".join(grid)
    assert judge("\n".join(grid), "." * 81).score == judge(text, text).score == 1
    changed = text[:cell] + symbol + text[cell + 1 :]
    assert judge(changed, "." * 81).score == (changed == text)


@settings(deadline=None)
@given(st.text() | st.text("0123456789 \n|-[],", max_size=200))
def test_no_text_raises(text):
    assert judge(text).score == judge(text, SMALL).score == 0 or judge(text, SMALL).score == 1


@pytest.mark.parametrize("text", [SOLUTION * 12_500, "[" * 10**6, "-" * 10**6, "1 " * 999, "[" * 1999, "9" * 1999])
def test_long_answers_are_refused_at_once(text):
    start = time.process_time()
    assert judge(text).score == 0
    assert time.process_time() - start < 1


def test_votes_ignore_the_layout():
    assert SudokuVerifier().same_answer("1 2\n2 1", "[[1, 2], [2, 1]]")
    assert not SudokuVerifier().same_answer("1 2\n2 1", "2 1\n1 2")
