#!/usr/bin/env bash
# Everything that needs a CUDA device, in one go within 10 minutes: the tests marked gpu, then the benchmarks.
# Prints what each part prints, then a table of how each ended. Returns 1 when a part failed or ran out of time.
# Runs in the environment of PYTHON (default: python), which needs torch with CUDA and what the tests need.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1

"$PYTHON" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no CUDA device")' || exit 1

output=$(mktemp)
trap 'rm -f "$output"' EXIT
table=()
failed=0

# run NAME LIMIT_S COMMAND...: one row of the table, whose last column is the last line that was printed
run() {
    local name=$1 limit_s=$2 started_at=$SECONDS outcome=ok
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$limit_s" "$@" 2>&1 | tee "$output"
    case ${PIPESTATUS[0]} in
        0) ;;
        124 | 137) outcome="over ${limit_s} s" failed=1 ;;
        *) outcome=failed failed=1 ;;
    esac
    table+=("$(printf '%-44s %-10s %4d s  %s' \
        "$name" "$outcome" $((SECONDS - started_at)) "$(tail -n 1 "$output")")")
}

run "tests" 210 "$PYTHON" -m pytest -m gpu
run "quickstart images" 30 "$PYTHON" examples/quickstart/make_data.py --output runs/quickstart_data
for setting in train.use_gradient_checkpointing={true,false} memory.stream_blocks=all model.quantize=int8; do
    run "step time, ${setting#*.}" 45 "$PYTHON" scripts/benchmarks/step_time.py "$setting"
done
run "checkpointing and offload" 180 "$PYTHON" scripts/benchmarks/checkpointing.py

echo
"$PYTHON" -c 'import torch; print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")'
printf '%s\n' "${table[@]}"
exit "$failed"
