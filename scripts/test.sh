#!/usr/bin/env bash
# Make the environment with the test extras, check style and types, and run the tests.
#   bash scripts/test.sh                       style, types and the tests that take seconds: half an hour on two busy cores
#   bash scripts/test.sh --gate                these and the tests marked `gate`, as .ci/run does
#   bash scripts/test.sh --all                 all of these, and those marked `slow`: hours
#   bash scripts/test.sh [--all] PATH ...      pytest on these paths, with any of its arguments
# Two files are tested at a time, since many tests wait for processes of their own; tests marked `alone` (servers, ranks
# and kills, with time limits) run one at a time. The others then run beside them, and what these print comes at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/environment.sh dev
which="${1:-}"
if [[ "$which" == --gate || "$which" == --all ]]; then
  shift
else
  which=""
fi
if [ "$#" -gt 0 ]; then
  if [ "$which" = --gate ]; then
    echo "--gate takes no paths: give them alone, or with --all" >&2
    exit 2
  fi
  marks="not slow"
  [ "$which" != --all ] || marks=""
  exec .venv/bin/python -m pytest -m "$marks" "$@"
fi
case "$which" in
  --gate) together="not alone and not slow"; alone="alone and not slow" ;;
  --all) together="not alone"; alone="alone" ;;
  *) together="not gate and not slow"; alone="" ;;
esac
export OMP_NUM_THREADS=1 MYPY_NUM_WORKERS=2
# Where an image switches them off, each of hundreds of processes would compile the library and the tests anew.
unset PYTHONDONTWRITEBYTECODE
# A model's memory is measured once for all of them.
RLVR_TEST_CACHE="$(mktemp -d)"
export RLVR_TEST_CACHE
log="$(mktemp)"
others=""
trap '[ -z "$others" ] || kill "$others" 2>/dev/null || true; cat "$log"; rm -rf "$log" "$RLVR_TEST_CACHE"' EXIT
status=0
echo "style and types"
.venv/bin/ruff check . || status=1
.venv/bin/ruff format --check --quiet . || status=1
.venv/bin/mypy || status=1
if [ -n "$alone" ]; then
  # The others are in the background and yield: tests marked `alone` wait for processes and seldom use both cores.
  nice -n 5 .venv/bin/python -m pytest -m "$together" -n 2 --dist loadfile >"$log" 2>&1 &
  others=$!
  echo "tests: $alone"
  .venv/bin/python -m pytest -m "$alone" || status=1
  echo "tests: $together"
  wait "$others" || status=1
else
  echo "tests: $together"
  .venv/bin/python -m pytest -m "$together" -n 2 --dist loadfile || status=1
fi
exit "$status"
