#!/usr/bin/env bash
# Check the pieces in FOLDER and unpack them into SITE, for PYTHONPATH=SITE. A piece that was not carried is left out.
#   bash scripts/gpu/unpack.sh FOLDER SITE
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$0")/pieces.py" unpack "$@"
