#!/usr/bin/env bash
# Everything that needs a CUDA device, in one go: the tests marked gpu, then the benchmarks.
# Runs in the environment of PYTHON (default: python), which needs torch with CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1

"$PYTHON" -c 'import sys, torch; print(torch.__version__, torch.cuda.get_device_name()); sys.exit(not torch.cuda.is_available())'
"$PYTHON" -m pytest -m gpu
"$PYTHON" examples/quickstart/make_data.py --output runs/quickstart_data
for checkpointing in true false; do
    echo "== step time, train.use_gradient_checkpointing=$checkpointing"
    "$PYTHON" scripts/benchmark_step_time.py "train.use_gradient_checkpointing=$checkpointing"
done
"$PYTHON" scripts/bench_checkpointing.py
"$PYTHON" scripts/bench_offload.py
