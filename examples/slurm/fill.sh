#!/bin/bash
# Fills the cache of a config, as jobs that know nothing of each other: each encodes one of so many parts.
#
#     sbatch --array=0-63 examples/slurm/fill.sh 64 --config my.yaml
#     sbatch --array=3,17 examples/slurm/fill.sh 64 --config my.yaml    # two that failed, once more
#
# README.md next to this file has what to change for a cluster.

#SBATCH --job-name=fill
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log

set -u

# Not the size of the array, which is another one where a few parts are done again.
num_parts=$1
shift

exec diffsynth-lite cache fill "$@" --part "$SLURM_ARRAY_TASK_ID/$num_parts"
