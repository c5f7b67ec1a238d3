#!/usr/bin/env bash
# Installs what is needed, teaches the embedded mini Qwen-Image four new colours, and shows before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
source scripts/run_example.sh

run_example quickstart make_data.py score.py mini_qwen_image "$@"
