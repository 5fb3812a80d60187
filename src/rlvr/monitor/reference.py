"""The docs page of metrics, rendered from the registry: what is registered is what is documented."""

from __future__ import annotations

from rlvr.monitor.metrics import FAMILIES, METRICS, Metric

_HEAD = """# Metrics

One JSON object per step in `metrics.jsonl`, and the same names in every tracker. Every key below is always there, and
null when not computed. Shares are between 0 and 1, times are seconds, `loss/*`, `grad_norm` and `ratio/*` are averages
over the step's optimizer steps. *Healthy* is what an ordinary run looks like: a reason to look, not an alarm.

This page is generated from `rlvr.monitor.metrics`.
"""


def metrics_page() -> str:
    """The registry as a Markdown page: one table of keys, one of families."""
    families = "\n## Families\n\nKeys that are there when something computes them.\n"
    return "\n".join([_HEAD, _table(METRICS), families, _table(FAMILIES)]) + "\n"


def _table(metrics: dict[str, Metric]) -> str:
    rows = [f"| `{m.name}` | {m.unit} | {m.description} | {m.healthy} |" for m in metrics.values()]
    return "\n".join(["| key | unit | what it says | healthy |", "|---|---|---|---|", *rows])
