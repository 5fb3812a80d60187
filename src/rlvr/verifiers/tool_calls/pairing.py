"""The best way to pair rows with columns of a small table of scores, each used at most once.

Pure functions; scores are at least 0 and tables have at least one row and one column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def assign(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The pairs (row, column) with the largest sum of scores: the Hungarian method, O(rows^2 columns)."""
    # The method below needs at least as many columns as rows, so that every row finds one.
    if len(scores) > len(scores[0]):
        return [(i, j) for j, i in assign(list(zip(*scores, strict=True)))]
    columns = len(scores[0])
    # Potentials of the dual problem: cost(i, j) - row_price[i] - column_price[j] >= 0, and 0 for pairs that are taken
    # (Kuhn 1955, Munkres 1957).
    row_price = [0.0] * len(scores)
    column_price = [0.0] * (columns + 1)
    owner = [-1] * (columns + 1)  # of each column: its row; the last column is where a new row starts
    for row in range(len(scores)):
        owner[columns] = row
        column = columns
        # The smallest reduced cost by which each column can be reached from the tree of alternating paths; `previous`
        # is the column before it.
        slack = [math.inf] * columns
        previous = [columns] * columns
        done = [False] * (columns + 1)
        while owner[column] >= 0:
            done[column] = True
            i = owner[column]
            step = math.inf
            nearest = columns
            for j in range(columns):
                if done[j]:
                    continue
                # Costs are negative scores: the method minimises.
                cost = -scores[i][j] - row_price[i] - column_price[j]
                if cost < slack[j]:
                    slack[j] = cost
                    previous[j] = column
                if slack[j] < step:
                    step = slack[j]
                    nearest = j
            for j in range(columns + 1):
                if done[j]:
                    # Columns in the tree keep reduced cost 0 with their rows; those outside come nearer by `step`.
                    row_price[owner[j]] += step
                    column_price[j] -= step
                elif j < columns:
                    slack[j] -= step
            column = nearest
        # Backwards along the path that was found: each column gets the row of the column before.
        while column != columns:
            owner[column] = owner[previous[column]]
            column = previous[column]
        owner[columns] = -1
    return [(owner[j], j) for j in range(columns) if owner[j] >= 0]


def align(scores: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """The pairs (row, column), rising in both, with the largest sum of scores: dynamic programming, O(rows columns)."""
    rows = len(scores)
    columns = len(scores[0])
    best = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            # best[i][j]: the largest sum of the rows from i on with the columns from j on.
            best[i][j] = max(best[i + 1][j], best[i][j + 1], scores[i][j] + best[i + 1][j + 1])
    pairs = []
    i = 0
    j = 0
    while i < rows and j < columns:
        # Ties leave a pair out: a pair with score 0 adds nothing.
        if best[i][j] == best[i + 1][j]:
            i += 1
        elif best[i][j] == best[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i = i + 1
            j = j + 1
    return pairs
