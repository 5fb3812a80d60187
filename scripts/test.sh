#!/usr/bin/env bash
# Make the environment with the test extras, check style and types, and run the tests.
#   bash scripts/test.sh [--all] [pytest arguments]       --all adds the tests that take minutes
# Without arguments two files are tested at a time, since many tests wait for processes of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh dev
select=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  select=()
  shift
fi
echo "style and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
.venv/bin/mypy
echo "tests"
if [ "$#" -eq 0 ]; then
  export OMP_NUM_THREADS=1
  set -- -n 2 --dist loadfile
fi
exec .venv/bin/python -m pytest "${select[@]}" "$@"
