"""The report that the command writes when a run ends."""

from __future__ import annotations

import logging

from rlvr.report import write_report
from rlvr.run.callbacks import Callback
from rlvr.run.run_view import RunView

log = logging.getLogger(__name__)


class ReportAtEnd(Callback):
    """Writes report.html of the run folder."""

    def on_end(self, run: RunView) -> None:
        """Write it. An error is logged, and does not fail the run."""
        try:
            write_report([run.path])
        except Exception as error:  # the run is done and saved; no fault of its report may make it look failed
            log.warning("the report could not be written: %s: %s", type(error).__name__, error)
