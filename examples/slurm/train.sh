#!/bin/bash
# Trains on one node or several. Where the job's time ends before the run does, the run saves, and goes on in
# the next job, which this one asks for:
#
#     sbatch examples/slurm/train.sh --config my.yaml
#     sbatch --nodes=4 examples/slurm/train.sh --config my.yaml memory.shard_base=node
#
# README.md next to this file has what to change for a cluster.

#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u

# After a stop signal torchrun waits so long for the checkpoint, and then kills: less than --signal leaves.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240

# srun takes no cores over from sbatch since SLURM 22.05: all processes of a node would share one.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:?say how many: sbatch --cpus-per-task}"

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs may share a node: each has a port of its own.
port=$((20000 + SLURM_JOB_ID % 10000))

# Only this shell gets USR1. The tasks get TERM, which torchrun hands on, and srun would not.
is_stopped=
trap 'is_stopped=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# Nodes whose torchrun goes on when that of another one has ended are waited for, and then ended as well. Not
# before SLURM itself has missed a node (SlurmdTimeout, mostly 300 s): then it queues the job again.
srun --label --wait=600 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv_backend c10d --rdzv_endpoint "$first_node:$port" --rdzv_id "$SLURM_JOB_ID" \
    -m diffsynth_lite.cli.train "$@" &
training=$!
wait "$training"
code=$?

if [ -n "$is_stopped" ]; then
    # The signal ended the first wait, not the training.
    wait "$training"
    code=$?
    if [ "$code" -ne 0 ]; then
        echo "$(date): the time of job $SLURM_JOB_ID is up; it is queued again, and goes on from its checkpoint."
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
