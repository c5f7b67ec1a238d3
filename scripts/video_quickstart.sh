#!/usr/bin/env bash
# Installs what is needed, teaches the embedded mini Wan a new motion from clips, and shows before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

prepare_environment

# The model is so small that a second thread only waits for the first.
export OMP_NUM_THREADS=1
run=runs/video_quickstart
data=runs/video_quickstart_data
example=examples/quickstart

"$PYTHON" "$example/make_clips.py" --output "$data"
"$PYTHON" -m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no \
    --dynamo_backend no train.py --config video_quickstart.yaml "$@"
"$PYTHON" "$example/score_clips.py" --model "$example/mini_wan" --lora "$run/lora" --data "$data" \
    --output "$run/score"

cat <<END

The LoRA:            $run/lora/pytorch_lora_weights.safetensors
Before and after:    $run/score/grid.png
Clips by step:       $run/previews (MP4, and their strips in grid.png)
Losses and speed:    $run/metrics.jsonl
END
