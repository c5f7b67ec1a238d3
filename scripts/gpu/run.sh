#!/usr/bin/env bash
# Measures on one GPU what README and docs/benchmarks.md show; --help lists the stages and the options.
# Runs in the environment of PYTHON (default: python), which needs torch with CUDA. What it lacks comes from the
# folder .wheels, where --wheels on another machine has fetched it.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
if compgen -G ".wheels/*.whl" >/dev/null && [[ " $* " != *" --wheels "* ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .wheels/*.whl
    export PYTHONPATH=$site:$PYTHONPATH
fi
"$PYTHON" scripts/gpu "$@"
