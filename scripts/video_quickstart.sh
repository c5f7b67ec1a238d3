#!/usr/bin/env bash
# Installs what is needed, teaches the embedded mini Wan a new motion from clips, and shows before and after.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
source scripts/run_example.sh

run_example video_quickstart make_clips.py score_clips.py mini_wan "$@"
