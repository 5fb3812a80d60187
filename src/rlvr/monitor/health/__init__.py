"""Monitors of a run's health: what is wrong, since when, and what to try, in words, at most once per cause.

| file | holds |
|---|---|
| monitors | the kinds of monitor, and the series of values that they look at |
| catalogue | the monitors that every run has |
| watch | runs them over the steps of a run, says and writes what they find |

Invariants:
- A monitor is a pure function of the metrics that it declares: a run that goes on from a checkpoint, and a report made
  later, find the same.
- What a monitor could not measure (None) is passed over, never taken for 0.
"""

from rlvr.monitor.health.catalogue import MONITORS
from rlvr.monitor.health.monitors import Finding, Monitor, Series
from rlvr.monitor.health.watch import MODES, Health, Watch, checked_modes, findings_of
