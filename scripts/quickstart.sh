#!/usr/bin/env bash
# From a fresh clone to a policy that learned: environment, then a run of configs/quickstart.yaml.
#   bash scripts/quickstart.sh [key.path=value ...]       for example run.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
exec .venv/bin/python -m rlvr.train --config configs/quickstart.yaml run.overwrite=true "$@"
