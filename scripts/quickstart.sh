#!/usr/bin/env bash
# From a fresh clone to a policy that learned: environment, then a run of configs/quickstart.yaml.
#   bash scripts/quickstart.sh [key.path=value ...]       for example run.seed=1
# A run of an earlier call is moved to runs/quickstart.old-TIME; remove those when you do not need them.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh
exec .venv/bin/python -m rlvr.train --config configs/quickstart.yaml run.overwrite=true "$@"
