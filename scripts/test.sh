#!/usr/bin/env bash
# Installs what the tests need and passes them all, with the checks of the code.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

prepare_environment dev
exec env PYTHON="$PYTHON" bash scripts/check "$@"
