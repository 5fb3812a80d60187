"""One self-contained HTML page of one run or several: `write_report`, and `python -m rlvr.report`.

| file | holds |
|---|---|
| folder | the data of a run folder, read leniently |
| sampled_rollouts | the choice of recorded rollouts for the page, and counts of the others |
| page | the page itself, runs that belong together, and differences of their configurations |
| static/ | its style and script |

Invariants:
- The page needs no network and nothing beside it. All that a model, a task or a user wrote reaches it as data and is
  shown as text, never as markup.
- A file that is missing, torn or of another version is left out, with a note on the page; only a path that is no run is
  refused.
- The page has the numbers of steps and rollouts that are left out.
"""

from rlvr.report.page import write_report
