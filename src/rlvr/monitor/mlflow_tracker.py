"""MLflow as a tracker: metrics, the configuration as parameters, tables of sample rollouts.

Invariants:
- Without a tracking server it writes to a database in the run folder's `mlflow/`; so it does, with a warning, where the
  server cannot be reached.
- A resumed run goes on in the same MLflow run.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.monitor.trackers import require, table_of

logger = logging.getLogger(__name__)

FEW = 100
"""Parameters in one call: MAX_PARAMS_TAGS_PER_BATCH of mlflow/utils/validation.py (3.17); more are refused."""
LONGEST = 500
"""Characters of a parameter's value; a longer one is cut. MLflow 3.17 takes 6,000, older servers 500."""
_RUN_ID = "run-id.txt"


class MlflowTracker:
    """A tracker (see `monitor.trackers.Tracker`) for MLflow.

    `uri` is the tracking server or store; None: what MLFLOW_TRACKING_URI says, else a database in the run folder.
    `experiment` is where the run is filed; `name` defaults to the run folder's. ConfigError when MLflow is not
    installed.
    """

    def __init__(self, uri: str | None = None, experiment: str = "rlvr", name: str | None = None) -> None:
        require("mlflow", "mlflow")
        self.uri = uri
        self.experiment = experiment
        self.name = name
        self._mlflow: Any = None
        self._client: Any = None
        self._run = ""

    def start(self, run: Mapping[str, Any], directory: str | Path) -> None:
        """Open the run in the store."""
        for key, value in {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # as shipped, an unreachable server is tried for minutes
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        }.items():
            # A value that the user set in the environment stays.
            os.environ.setdefault(key, value)
        self._mlflow = importlib.import_module("mlflow")
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # the tables that a new database gets
        folder = Path(directory).resolve() / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI")
        name = self.name or folder.parent.name
        if uri is not None:
            try:
                self._open(uri, None, folder, name, run)
                return
            # Whatever MLflow and its HTTP client raise for a server that is not there: the database is the way out.
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                logger.warning("mlflow cannot log to %s and logs to %s: %s", uri, folder, reason)
        self._open(f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri(), folder, name, run)

    def _open(self, uri: str, artifacts: str | None, folder: Path, name: str, run: Mapping[str, Any]) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        id_file = folder / _RUN_ID
        if id_file.exists():
            run_id, _, store = id_file.read_text().partition(" ")
            # The run that this folder had in this store, open again.
            if store == uri:
                self._client.update_run(run_id, status="RUNNING")
                self._run = run_id
                return
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            number = self._client.create_experiment(self.experiment, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        self._run = self._client.create_run(number, run_name=name).info.run_id
        # Written before the parameters: a process that dies here is resumed in the same run, without them.
        id_file.write_text(f"{self._run} {uri}")
        params = [self._mlflow.entities.Param(_key(key), str(value)[:LONGEST]) for key, value in _leaves(run)]
        for begin in range(0, len(params), FEW):
            self._client.log_batch(self._run, params=params[begin : begin + FEW])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step's numbers; None and texts are left out."""
        # MLflow's timestamps are milliseconds since 1970.
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        numbers = [
            metric(_key(name), float(value), now, step)
            for name, value in metrics.items()
            if isinstance(value, (bool, int, float)) and name != "step"
        ]
        self._client.log_batch(self._run, metrics=numbers)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of sample rollouts, `rollouts/step-N.json` among the run's artifacts."""
        if not rows:
            return
        columns, data = table_of(rows)
        # The form of MLflow's own tables, which its pages show; `log_table` would read and write the file anew each
        # time.
        self._client.log_dict(self._run, {"columns": columns, "data": data}, f"rollouts/step-{step:06d}.json")

    def finish(self) -> None:
        """Mark the run as done."""
        if self._run:
            self._client.set_terminated(self._run)


def _key(name: str) -> str:
    """The name in the letters that MLflow takes: pass@8 is pass_at_8."""
    # `eval/pass@8` becomes `eval/pass_at_8`; `reward/mean` is unchanged. Two names that differ in odd characters only
    # would be one metric.
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration by their dotted keys."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree
