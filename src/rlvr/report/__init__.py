"""One self-contained HTML page of one run or several: `write_report`, and `python -m rlvr.report`.

| file | holds |
|---|---|
| folder | what is in a run folder, read leniently |
| sampling | which recorded rollouts go into the page, and what is counted of the others |
| pieces | which characters of a completion each token wrote |
| compare | which runs belong together, and what differs in their configurations |
| page | the page itself |
| static/ | its style and script |

Invariants:
- The page needs no network and nothing beside it. All that a model, a task or a user wrote reaches it as data and is
  shown as text, never as markup.
- Whatever is missing, torn or of another version costs what it holds and is said on the page; only a path that is no
  run is refused.
- What is left out, of steps or rollouts, is said with numbers.
"""

from rlvr.report.page import write_report

__all__ = ["write_report"]
