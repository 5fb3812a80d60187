#!/usr/bin/env bash
# Make the environment with the test extras, check style and types, and run the tests.
#   bash scripts/test.sh [--all] [pytest arguments]       --all adds the tests that take minutes
# Without arguments two files are tested at a time, since many tests wait for processes of their own; then those marked
# `alone`, one at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh dev
speed="not slow"
if [ "${1:-}" = "--all" ]; then
  speed="slow or not slow"
  shift
fi
echo "style and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
echo "tests"
if [ "$#" -gt 0 ]; then
  exec .venv/bin/python -m pytest -m "$speed" "$@"
fi
export OMP_NUM_THREADS=1
status=0
.venv/bin/python -m pytest -m "($speed) and not alone" -n 2 --dist loadfile || status=1
echo "tests that have the machine to themselves: servers, ranks and kills, with time limits"
.venv/bin/python -m pytest -m "($speed) and alone" || status=1
exit "$status"
