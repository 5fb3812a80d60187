#!/usr/bin/env bash
# Install what the sandbox of the `code` verifier needs (bubblewrap) where that is possible, and print the tier of this machine.
#   bash scripts/sandbox.sh
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v bwrap >/dev/null; then
  if [ "$(id -u)" = 0 ]; then as=(); elif sudo -n true 2>/dev/null; then as=(sudo); else as=(none); fi
  if [ "${as[*]-}" = none ]; then
    echo "bubblewrap is missing and only root can install it: apt install bubblewrap, or dnf install bubblewrap" >&2
    exit 1
  elif command -v apt-get >/dev/null; then
    "${as[@]}" apt-get update -qq && "${as[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap
  elif command -v dnf >/dev/null; then
    "${as[@]}" dnf install -y -q bubblewrap
  else
    echo "bubblewrap is missing: install it with this system's package manager" >&2
    exit 1
  fi
fi
exec .venv/bin/python - <<'PYTHON'
import sys

from rlvr.errors import RlvrError
from rlvr.verifiers.code.sandbox import languages, open_runner

try:
    print(f"sandbox: tier {open_runner().tier}; languages: {', '.join(languages())}")
except RlvrError as error:
    sys.exit(f"sandbox: {error}")
PYTHON
